//! Candidates, their order, and the tables.

use super::Options;
use super::shapes::{LAYERS, Layer, Pass};
use super::tensors::{Case, Pool};
use crate::stats::Millis;
use crate::{Result, device};
use cubecl::client::Client;
use flash_dma_kernels::product::{Choice, Route, Tile};
use serde::Serialize;
use std::time::Instant;

/// Parts of the sums of a gradient of a weight.
const PARTS: [usize; 6] = [1, 4, 8, 16, 32, 64];

/// One measurement, or the reason for its absence.
#[derive(Serialize)]
struct Row {
    layer: &'static str,
    pass: Pass,
    m: usize,
    n: usize,
    k: usize,
    candidate: String,
    /// `None` if the rule decides.
    parts: Option<usize>,
    ms: Option<Millis>,
    tflops: Option<f64>,
    /// Greatest error of a sampled entry, relative to the allowed one.
    error: Option<f64>,
    refused: Option<String>,
    /// Time of compilation, check and timing.
    seconds: f64,
    device: String,
    commit: String,
}

/// Candidates; `None` for the rule's choice.
fn candidates(case: &Case) -> Vec<Option<Choice>> {
    let with = |route, parts| Some(Choice { route, parts });
    let mut all = vec![None, with(Route::Standard, 1)];
    if case.cold {
        all.push(with(Route::FewRows, 1));
    }
    let parts = match case.pass {
        Pass::Weight => &PARTS[..],
        Pass::Forward | Pass::Input => &[1],
    };
    for route in Tile::ALL.map(Route::Wgmma) {
        all.extend(parts.iter().map(|&parts| with(route, parts)));
    }
    all
}

/// Name of a candidate in its row, without its parts.
fn name(candidate: Option<Choice>) -> String {
    match candidate.map(|choice| choice.route) {
        None => "rule".into(),
        Some(Route::Standard) => "standard".into(),
        Some(Route::FewRows) => "few-rows".into(),
        Some(Route::Wgmma(tile)) => format!("wgmma-{}", tile.columns()),
        Some(other) => format!("{other:?}"),
    }
}

struct Sweep<'a> {
    options: &'a Options,
    client: &'a Client,
    rows: Vec<Row>,
}

/// Runs everything and prints the tables.
pub fn run(options: &Options) -> Result {
    let client = &options.on.client()?;
    let (layers, tokens) = if options.tiny {
        (vec![LAYERS[0].shrunk(32)], 160)
    } else {
        (LAYERS.to_vec(), options.tokens)
    };
    let mut sweep = Sweep {
        options,
        client,
        rows: Vec::new(),
    };
    let pool = Pool::new(client, &layers, tokens);
    for &rows in &options.rows {
        for &layer in &layers {
            sweep.measure(&Case::decoding(client, &pool, layer, rows))?;
        }
    }
    if options.rows.is_empty() {
        for &layer in &layers {
            for pass in Pass::ALL {
                sweep.measure(&Case::new(client, &pool, layer, pass, tokens))?;
            }
        }
        sweep.report(&layers);
    }
    options.on.common.compare(&sweep.rows)
}

impl Sweep<'_> {
    /// A row for each candidate.
    fn measure(&mut self, case: &Case) -> Result {
        let common = &self.options.on.common;
        let sizes = case.sizes();
        let flops = 2.0 * (sizes.m * sizes.n) as f64 * sizes.k as f64;
        for candidate in candidates(case) {
            let started = Instant::now();
            let (error, ms, refused) = match case.check(self.client, candidate) {
                Ok(error) => {
                    let times = case.times(self.client, candidate, common.runs);
                    (Some(error), Some(Millis::of(times)), None)
                }
                Err(reason) => (None, None, Some(reason)),
            };
            let row = Row {
                layer: case.layer.name,
                pass: case.pass,
                m: sizes.m,
                n: sizes.n,
                k: sizes.k,
                candidate: name(candidate),
                parts: candidate.map(|choice| choice.parts),
                ms,
                tflops: ms.map(|ms| flops / ms.median / 1e9),
                error,
                refused,
                seconds: started.elapsed().as_secs_f64(),
                device: device::name(self.client),
                commit: common.commit.clone(),
            };
            println!(
                "{:12} {:5} {:8} {}",
                row.layer,
                row.m,
                format!("{:?}", row.pass),
                describe(&row)
            );
            self.rows.push(row);
            common.write(&self.rows)?;
        }
        Ok(())
    }

    /// Every layer and product, the fastest first, and the time of a step.
    fn report(&self, layers: &[Layer]) {
        let mut totals = [0.0f64; 3];
        for layer in layers {
            for pass in Pass::ALL {
                let of = |row: &&Row| (row.layer, row.pass) == (layer.name, pass);
                let mut rows: Vec<&Row> = self.rows.iter().filter(of).collect();
                let rate = |row: &Row| row.tflops.unwrap_or(-1.0);
                rows.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
                let best = rows[0];
                println!(
                    "\n{} {pass:?}: m {}, n {}, k {}",
                    layer.name, best.m, best.n, best.k
                );
                for row in &rows {
                    println!("  {}", describe(row));
                }
                let named = |name| rows.iter().copied().find(|row| row.candidate == name);
                let compared = [named("rule"), named("standard"), Some(best)];
                for (total, row) in totals.iter_mut().zip(compared) {
                    let ms = row.and_then(|row| row.ms);
                    *total += ms.map_or(f64::NAN, |ms| ms.median) * layer.times as f64;
                }
            }
        }
        let [rule, standard, best] = totals;
        println!(
            "\nproducts of a step: {rule:.2} ms by the rule, {standard:.2} as Burn has them, {best:.2} by the best"
        );
    }
}

fn describe(row: &Row) -> String {
    let parts = row.parts.map_or("-".into(), |parts| parts.to_string());
    let head = format!("{:9} parts {parts:>2}", row.candidate);
    match (&row.ms, row.tflops) {
        (Some(ms), Some(tflops)) => format!(
            "{head} {tflops:8.1} TFLOP/s {:9.4} ms [{:.4}, {:.4}] error {:.2} ({:.1} s)",
            ms.median,
            ms.q1,
            ms.q3,
            row.error.unwrap_or(f64::NAN),
            row.seconds
        ),
        _ => {
            let reason = row.refused.as_deref().unwrap_or("no reason");
            let line: String = reason.split_whitespace().collect::<Vec<_>>().join(" ");
            format!("{head} {}", line.chars().take(160).collect::<String>())
        }
    }
}

//! The order of the measurements, their limits, and the tables.

use super::Options;
use super::candidates::{self, Candidate, in_parts};
use super::shapes::{LAYERS, Layer, Pass};
use super::tensors::{Case, Pool};
use crate::stats::Millis;
use crate::{Result, device, panic_text};
use cubecl::client::Client;
use flash_dma_kernels::product::Route;
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Parts of the sums of a gradient of a weight.
const PARTS: [usize; 6] = [1, 4, 8, 16, 32, 64];

/// Parts while all candidates are compared.
const SCREENING_PARTS: usize = 8;

const STANDARD: Candidate = candidates::whole(Route::Standard);

/// One measurement, or why there is none.
#[derive(Clone, Serialize)]
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
    /// The greatest error of a sampled entry, of what is allowed.
    error: Option<f64>,
    refused: Option<String>,
    /// Compilation, check and timing.
    seconds: f64,
    device: String,
    commit: String,
}

/// Ends the program if a candidate does not.
struct Watchdog(Arc<Mutex<Option<(String, Instant)>>>);

impl Watchdog {
    fn new(patience: Duration) -> Self {
        let current: Arc<Mutex<Option<(String, Instant)>>> = Arc::default();
        let watched = current.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let Ok(current) = watched.lock() else { return };
                if let Some((name, since)) = &*current
                    && since.elapsed() > patience
                {
                    eprintln!("{name} does not end: start again with `--skip '{name}'`");
                    std::process::exit(4);
                }
            }
        });
        Self(current)
    }

    fn watch<T>(&self, name: &str, run: impl FnOnce() -> T) -> T {
        let set = |value| {
            if let Ok(mut current) = self.0.lock() {
                *current = value;
            }
        };
        set(Some((name.to_owned(), Instant::now())));
        let result = run();
        set(None);
        result
    }
}

struct Sweep<'a> {
    options: &'a Options,
    client: &'a Client,
    begun: Instant,
    watchdog: Watchdog,
    rows: Vec<Row>,
}

/// Runs everything and prints the tables.
pub fn run(options: &Options, client: &Client) -> Result {
    let (layers, tokens) = if options.tiny {
        (vec![LAYERS[0].shrunk(32)], 160)
    } else {
        (LAYERS.to_vec(), options.tokens)
    };
    let mut sweep = Sweep {
        options,
        client,
        begun: Instant::now(),
        watchdog: Watchdog::new(Duration::from_secs(options.patience)),
        rows: Vec::new(),
    };
    let wanted = |candidate: &Candidate| {
        let name = candidates::name(*candidate);
        !options.skip.contains(&name)
            && (options.only.is_empty()
                || options.only.iter().any(|part| name.contains(part.as_str())))
    };
    let candidates: Vec<_> = candidates::all().into_iter().filter(wanted).collect();
    let pool = Pool::new(client, &layers, tokens);
    if !options.rows.is_empty() {
        for &rows in &options.rows {
            for &layer in &layers {
                let case = Case::decoding(client, &pool, layer, rows);
                for candidate in candidates::decoding().into_iter().filter(wanted) {
                    sweep.measure(&case, candidate)?;
                }
            }
        }
        return Ok(());
    }

    // What a training step takes with the rule and without comes first: it matters whatever else fails.
    for &layer in &layers {
        for pass in Pass::ALL {
            let case = Case::new(client, &pool, layer, pass);
            sweep.measure(&case, None)?;
            sweep.measure(&case, STANDARD)?;
        }
    }
    let first = Pass::ALL.map(|pass| Case::new(client, &pool, layers[0], pass));
    for &candidate in &candidates {
        for case in &first {
            let parts = match case.pass {
                Pass::Weight => SCREENING_PARTS,
                Pass::Forward | Pass::Input => 1,
            };
            sweep.measure(case, in_parts(candidate, parts))?;
        }
    }
    for case in &first {
        let best = sweep.best(case, &candidates);
        for &layer in &layers {
            let case = Case::new(client, &pool, layer, case.pass);
            for &candidate in &best {
                match case.pass {
                    Pass::Forward | Pass::Input => sweep.measure(&case, candidate)?,
                    Pass::Weight => {
                        for parts in PARTS {
                            sweep.measure(&case, in_parts(candidate, parts))?;
                        }
                    }
                }
            }
        }
    }
    sweep.report(&layers);
    Ok(())
}

impl Sweep<'_> {
    /// Measures a candidate unless it has been, or the time is up.
    fn measure(&mut self, case: &Case, candidate: Candidate) -> Result {
        let (name, parts) = (
            candidates::name(candidate),
            candidate.map(|choice| choice.parts),
        );
        let known = self.rows.iter().any(|row| {
            (row.layer, row.pass, row.m) == (case.layer.name, case.pass, case.sizes().m)
                && (&row.candidate, row.parts) == (&name, parts)
        });
        let late = self.begun.elapsed().as_secs() >= self.options.seconds;
        if known || late || self.options.skip.contains(&name) {
            return Ok(());
        }
        let started = Instant::now();
        let (client, runs) = (self.client, self.options.on.common.runs);
        let outcome = self.watchdog.watch(&name, || {
            // CubeK panics where its own tuning would catch it.
            catch_unwind(AssertUnwindSafe(|| {
                let error = case.check(client, candidate)?;
                Ok((error, Millis::of(case.times(client, candidate, runs))))
            }))
            .unwrap_or_else(|panic| Err(format!("panicked: {}", panic_text(&*panic))))
        });
        let sizes = case.sizes();
        let flops = 2.0 * (sizes.m * sizes.n) as f64 * sizes.k as f64;
        let (error, ms, refused) = match outcome {
            Ok((error, ms)) => (Some(error), Some(ms), None),
            Err(reason) => (None, None, Some(reason)),
        };
        let tflops = ms.map(|ms| flops / ms.median / 1e9);
        let row = Row {
            layer: case.layer.name,
            pass: case.pass,
            m: sizes.m,
            n: sizes.n,
            k: sizes.k,
            candidate: name.clone(),
            parts,
            ms,
            tflops,
            error,
            refused,
            seconds: started.elapsed().as_secs_f64(),
            device: device::name(self.client),
            commit: self.options.on.common.commit.clone(),
        };
        println!(
            "{:6.0} s  {:12} {:5} {:8} {}",
            self.begun.elapsed().as_secs_f64(),
            row.layer,
            row.m,
            format!("{:?}", row.pass),
            describe(&row)
        );
        let broken = row.refused.as_ref().is_some_and(|reason| {
            reason.contains("failed on the device") || reason.starts_with("panicked")
        });
        self.rows.push(row);
        self.options.on.common.write(&self.rows)?;
        if broken && case.check(self.client, STANDARD).is_err() {
            let what =
                format!("the device is lost after {name}: start again with `--skip '{name}'`");
            return Err(what.into());
        }
        Ok(())
    }

    /// The fastest candidates of the case on which all have met.
    fn best(&self, case: &Case, candidates: &[Candidate]) -> Vec<Candidate> {
        let time = |candidate: Candidate| {
            let name = candidates::name(candidate);
            let rows = (self.of(case.layer.name, case.pass)).filter(|row| row.candidate == name);
            rows.filter_map(|row| row.ms.map(|ms| ms.median))
                .min_by(f64::total_cmp)
        };
        let mut timed: Vec<_> = (candidates.iter().filter(|candidate| candidate.is_some()))
            .filter_map(|&candidate| Some((candidate, time(candidate)?)))
            .collect();
        timed.sort_by(|a, b| a.1.total_cmp(&b.1));
        timed.truncate(self.options.top);
        timed.into_iter().map(|(candidate, _)| candidate).collect()
    }

    /// The rows of a layer's product, in the order of their measurement.
    fn of(&self, layer: &'static str, pass: Pass) -> impl Iterator<Item = &Row> {
        (self.rows.iter()).filter(move |row| (row.layer, row.pass) == (layer, pass))
    }

    /// Every layer and product, the fastest first, and what a step takes.
    fn report(&self, layers: &[Layer]) {
        let mut totals = [0.0f64; 3];
        for layer in layers {
            for pass in Pass::ALL {
                let measured: Vec<_> = self.of(layer.name, pass).collect();
                let mut rows = measured.clone();
                let rate = |row: &Row| row.tflops.unwrap_or(-1.0);
                rows.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
                let Some(best) = rows.first() else { continue };
                println!(
                    "\n{} {pass:?}: m {}, n {}, k {}",
                    layer.name, best.m, best.n, best.k
                );
                for row in &rows {
                    println!("  {}", describe(row));
                }
                let time = |row: Option<&&Row>| {
                    let ms = row.and_then(|row| row.ms);
                    ms.map_or(f64::NAN, |ms| ms.median)
                };
                let rule = rows.iter().find(|row| row.candidate == "rule");
                // The one without parts was measured first.
                let standard = measured.iter().find(|row| row.candidate == "standard");
                for (total, row) in totals.iter_mut().zip([rule, standard, Some(best)]) {
                    *total += time(row) * layer.times as f64;
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
    let head = format!("{:38} parts {parts:>2}", row.candidate);
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

//! Joins measured rows with a peers' file into the README's and the book's tables and plots.
//!
//! ```text
//! cargo xtask bench-report
//! ```

use clap::Parser;
use flash_dma_benches::report::{Chart, Peers, Report, Series, replace_section};
use flash_dma_benches::roof::Roof;
use flash_dma_benches::rows::{Phase, Row};
use flash_dma_benches::workloads::Workload;
use flash_dma_problem::ElementType;
use flash_dma_reference::generate::Scores;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes tables and plots of measured rows into the README and the book.
#[derive(Parser)]
struct Args {
    /// Folder of one device's measurements: `peers.jsonl`, `roof.json` and files of rows.
    #[arg(long, default_value = "bench-results/h200")]
    results: PathBuf,
    /// Files of rows in that folder; of two rows for the same workload,
    /// phase and engine the later file's stays.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "portable-f32.json,portable-bf16.json,mma.json,wgmma.json"
    )]
    rows: Vec<PathBuf>,
    /// Gets the short table between its marks.
    #[arg(long, default_value = "README.md")]
    readme: PathBuf,
    /// Gets all tables between its marks.
    #[arg(long, default_value = "book/src/performance.md")]
    page: PathBuf,
    /// Gets the plots.
    #[arg(long, default_value = "book/src/img")]
    plots: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench-report: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let mut rows: Vec<Row> = Vec::new();
    for file in &args.rows {
        let path = args.results.join(file);
        rows.extend::<Vec<Row>>(parse(&path, &read(&path)?)?);
    }
    let peers = Peers::parse(&read(&args.results.join("peers.jsonl"))?)?;
    let path = args.results.join("roof.json");
    let roof: Option<Roof> = match path.exists() {
        true => Some(parse(&path, &read(&path)?)?),
        false => None,
    };
    let report = Report::new(rows, peers, roof.clone());

    for (name, chart, base) in [
        (
            "forward-by-length",
            by_length(&report, Phase::EndToEnd),
            2.0,
        ),
        (
            "backward-by-length",
            by_length(&report, Phase::Backward),
            2.0,
        ),
        ("forward-by-window", by_window(&report), 2.0),
        ("roofline", roofline(&report, roof.as_ref()), 10.0),
    ] {
        if let Some(svg) = chart.svg(base) {
            write(&args.plots.join(format!("{name}.svg")), &svg)?;
        }
    }
    section(&args.readme, &report.summary())?;
    section(&args.page, &report.full())
}

/// A layer of the table's large family: 32 query heads of 128.
fn is_layer(w: &Workload) -> bool {
    w.name.starts_with("layer") && w.element == ElementType::Bf16 && w.scores == Scores::Normal
}

fn time(report: &Report, w: &Workload, phase: Phase) -> Option<f64> {
    report.best(w, phase).map(|row| row.ms.median)
}

/// Time over the length, ours and the peers'.
fn by_length(report: &Report, phase: Phase) -> Chart {
    let measured = |window: Option<usize>| -> Vec<&'static Workload> {
        report
            .phase(phase)
            .map(|(w, _)| w)
            .filter(|w| is_layer(w) && w.window == window)
            .collect()
    };
    let ours = |name: &str, window| Series {
        name: name.into(),
        points: measured(window)
            .into_iter()
            .filter_map(|w| Some((w.len as f64, time(report, w, phase)?)))
            .collect(),
        line: true,
    };
    let peer = |name: &str, key: &str| Series {
        name: name.into(),
        points: measured(Some(2048))
            .into_iter()
            .filter_map(|w| Some((w.len as f64, report.dense(w, key, phase)?)))
            .collect(),
        line: true,
    };
    let (title, what) = match phase {
        Phase::Backward => ("Backward", ""),
        _ => ("Forward", ", selection included"),
    };
    Chart {
        title: format!("{title}, H 32/8, D 128, bf16, causal{what}"),
        x: "queries and keys".into(),
        y: "ms".into(),
        series: vec![
            ours("ours, w 2048", Some(2048)),
            ours("ours, dense", None),
            peer("FlashAttention-2", "sdpa-flash dense"),
            peer("cuDNN", "sdpa-cudnn dense"),
        ],
    }
}

/// Time over the window at 32K keys.
fn by_window(report: &Report) -> Chart {
    let series = |name: &str, phase| {
        let at = report.phase(phase).map(|(w, _)| w);
        let at = at.filter(|w| is_layer(w) && w.len == 32768);
        let point = |w: &Workload| Some((w.window? as f64, time(report, w, phase)?));
        let mut points: Vec<(f64, f64)> = at.filter_map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series {
            name: name.into(),
            points,
            line: true,
        }
    };
    Chart {
        title: "N 32K, H 32/8, D 128, bf16, causal".into(),
        x: "keys a query keeps".into(),
        y: "ms".into(),
        series: vec![
            series("selection", Phase::Select),
            series("selection and forward", Phase::EndToEnd),
            series("backward", Phase::Backward),
        ],
    }
}

/// Rate over operations a byte, and what the device allows.
fn roofline(report: &Report, roof: Option<&Roof>) -> Chart {
    let points = |phase: Phase, sparse: bool| -> Vec<(f64, f64)> {
        let rows = report
            .phase(phase)
            .filter(|(w, _)| w.window.is_some() == sparse);
        rows.filter_map(|(w, row)| {
            let flops = phase.flops(&w.problem().ok()?)? as f64;
            Some((flops / row.bytes? as f64, row.tflops?))
        })
        .collect()
    };
    let mut series = Vec::new();
    for (name, phase, sparse) in [
        ("forward, sparse", Phase::Forward, true),
        ("forward, dense", Phase::Forward, false),
        ("backward, sparse", Phase::Backward, true),
        ("backward, dense", Phase::Backward, false),
    ] {
        let points = points(phase, sparse);
        series.push(Series {
            name: name.into(),
            points,
            line: false,
        });
    }
    if let Some(roof) = roof {
        let ridge = roof.bf16_tflops * 1e3 / roof.copy_gbs;
        let all = series.iter().flat_map(|s| &s.points);
        let end = all.map(|p| p.0).fold(2.0 * ridge, f64::max);
        let start = ridge / 4.0;
        series.push(Series {
            name: "measured roof, bf16".into(),
            points: vec![
                (start, start * roof.copy_gbs / 1e3),
                (ridge, roof.bf16_tflops),
                (end, roof.bf16_tflops),
            ],
            line: true,
        });
    }
    Chart {
        title: "Useful rate over arithmetic intensity".into(),
        x: "operations a byte (active pairs, one pass over the tensors)".into(),
        y: "TFLOP/s on active pairs".into(),
        series,
    }
}

fn section(path: &Path, content: &str) -> Result<(), String> {
    let page = replace_section(&read(path)?, "bench-report", content)
        .map_err(|e| format!("{}: {e}", path.display()))?;
    write(path, &page)
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    println!("bench-report: {}", path.display());
    std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("{}: {e}", path.display()))
}

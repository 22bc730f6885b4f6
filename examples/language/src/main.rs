//! `language`: see `language --help`, `arm.rs` for what is compared, and `needles.rs` for the questions.

use burn::module::Module;
use burn::tensor::Device;
use clap::Parser;
use language::answers::FACTORS;
use language::arm::Arm;
use language::cli::{Cli, Options};
use language::needles::Kind;
use language::rows::{Row, WindowLosses, differences, expected_seconds, peer};
use language::run::Material;
use language::settings::Settings;
use language::train::Point;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
use train_text::data::Corpus;
use train_text::model::TextModel;
use train_text::{report, rows};

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("language: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), String> {
    let ((task, options), start) = (cli.options(), Instant::now());
    let time = options.time()?;
    // Options are refused before a corpus is read.
    options.runs(task, "")?;
    let corpus = match &options.data {
        Some(path) => Corpus::read(path),
        None => Corpus::own_repository(),
    };
    let corpus = corpus.map_err(|error| error.to_string())?;
    let runs = options.runs(task, &corpus.fingerprint())?;
    if options.dry_run {
        list(&runs, &rows::read(&options.out)?);
        return Ok(());
    }
    println!("{}: {} bytes", corpus.source.display(), corpus.bytes.len());
    let material = Material::new(corpus, &runs[0]).map_err(|error| error.to_string())?;
    let device = options.device.open(runs[0].dtype);
    let device = device.map_err(|error| error.to_string())?;
    for folder in options
        .out
        .parent()
        .into_iter()
        .chain(options.checkpoints.as_deref())
    {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let _held = rows::hold(&options.out)?;
    let mut done: Vec<Row> = rows::read(&options.out)?;
    let mut not_begun = 0;
    for (index, run) in runs.iter().enumerate() {
        println!("{:3} of {}: {}", index + 1, runs.len(), run.title());
        if done.iter().any(|row| row.settings == *run) {
            println!("    {} has this row", options.out.display());
            continue;
        }
        if let Some(time) = time {
            let expected = expected_seconds(&done, run).unwrap_or(0.0);
            if start.elapsed().as_secs_f64() + expected > time.as_secs_f64() {
                println!("    may take {expected:.0} s, which are not left");
                not_begun += 1;
                continue;
            }
        }
        done.push(row(run, &material, options, &device)?);
        rows::write(&options.out, &done)?;
    }
    for run in &runs {
        if let Some(row) = done.iter().find(|row| row.settings == *run) {
            summarise(row, &done);
        }
    }
    if not_begun > 0 {
        println!("{not_begun} runs were not begun: the same call goes on with them");
    }
    Ok(())
}

/// Makes the row of a run.
fn row(
    run: &Settings,
    material: &Material,
    options: &Options,
    device: &Device,
) -> Result<Row, String> {
    let start = Instant::now();
    let outcome = material.run(run, device, show);
    let (model, outcome) = outcome.map_err(|error| error.to_string())?;
    if let Some(folder) = &options.checkpoints {
        save(model, run, folder)?;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = || format!("{device:?}, {threads} threads");
    let commit = options.commit.clone().or_else(report::commit);
    Ok(Row {
        commit: commit.unwrap_or_else(|| "unknown".into()),
        machine: options.machine.clone().unwrap_or_else(machine),
        settings: run.clone(),
        seconds: start.elapsed().as_secs_f64(),
        outcome,
    })
}

fn save(model: TextModel, run: &Settings, folder: &Path) -> Result<(), String> {
    let task = format!("{:?}", run.task).to_lowercase();
    let name = format!("{task}-{}-{}-{}.bpk", run.arm.name(), run.tokens, run.seed);
    let path = folder.join(name);
    let saved = model.into_record().save(&path);
    saved.map_err(|error| format!("{}: {error}", path.display()))
}

/// Prints the runs, and what they may take.
fn list(runs: &[Settings], rows: &[Row]) {
    let (mut sum, mut unknown, mut left) = (0.0, 0, 0);
    for (index, run) in runs.iter().enumerate() {
        let (number, title) = (index + 1, run.title());
        if rows.iter().any(|row| row.settings == *run) {
            println!("{number:3} {title}: there");
            continue;
        }
        left += 1;
        match expected_seconds(rows, run) {
            Some(seconds) => {
                sum += seconds;
                println!("{number:3} {title}: {seconds:.0} s");
            }
            None => {
                unknown += 1;
                println!("{number:3} {title}");
            }
        }
    }
    println!(
        "{left} of {} runs are left: {sum:.0} s; {unknown} of them have no rows to go by",
        runs.len()
    );
}

fn show(point: &Point) {
    let number = |number: Option<f64>| number.map_or("     –".into(), |n| format!("{n:6.3}"));
    let answers = point
        .answer_loss
        .map_or(String::new(), |loss| format!("  answers {loss:6.3}"));
    println!(
        "    step {:5}  training {}  validation {:6.3}{answers}  {:.0} s",
        point.step,
        number(point.training_loss),
        point.validation_loss,
        point.seconds,
    );
}

/// Prints what a row says, beside that of the dense arm.
fn summarise(row: &Row, rows: &[Row]) {
    let step = row.outcome.training.step_milliseconds;
    let step = step.map_or(String::new(), |time| format!(", {time:.1} ms a step"));
    println!("{}{step}", row.settings.title());
    let dense = peer(rows, &row.settings, Arm::Dense);
    let differences = dense.map_or(Vec::new(), |dense| differences(row, dense));
    for (index, losses) in row.outcome.losses.iter().enumerate() {
        let difference = differences
            .get(index)
            .and_then(|(_, difference)| *difference);
        let difference = difference.map_or(String::new(), |d| format!(", to dense {d}"));
        println!(
            "    {:6} bytes: loss {:.4}{difference}",
            losses.length, losses.loss
        );
    }
    for WindowLosses { window, losses } in &row.outcome.losses_by_window {
        println!("    with {window} keys: loss {:.4}", losses.loss);
    }
    let Some(answers) = &row.outcome.answers else {
        return;
    };
    for (index, caches) in answers.caches.iter().enumerate() {
        let right = |kind: Kind| {
            let of = |a: &&_| at(a, caches.length, kind);
            let shares: Vec<f64> = answers
                .answered
                .iter()
                .filter(of)
                .map(|a| a.right)
                .collect();
            100.0 * shares.iter().sum::<f64>() / shares.len() as f64
        };
        println!(
            "    {:6} bytes ({} x): passkey {:5.1} %, needle {:5.1} %, caches {} bytes a text",
            caches.length,
            FACTORS[index],
            right(Kind::Passkey),
            right(Kind::Needle),
            caches.bytes,
        );
    }
}

fn at(answered: &language::answers::Answered, length: usize, kind: Kind) -> bool {
    answered.length == length && answered.kind == kind
}

//! `train-text`: see `train-text --help`; the model is `flash_dma_models::nn::Decoder`.

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use train_text::cli::{Cli, Settings};
use train_text::data::{Corpus, Text};
use train_text::error::Error;
use train_text::generate::sampler;
use train_text::report::{CorpusFacts, Plan};
use train_text::sample::SampleOptions;
use train_text::{plot, report, sample, train};

/// Bytes of validation text a sample continues unless `--prompt` is given.
const PROMPT_BYTES: usize = 64;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train-text: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), Error> {
    let corpus = match &cli.data {
        Some(path) => Corpus::read(path)?,
        None => Corpus::own_repository()?,
    };
    let plan = plan(cli, &corpus)?;
    let Plan {
        settings,
        corpus: facts,
        ..
    } = &plan;
    let device = settings.device.open(settings.dtype)?;
    let sampler = sampler(settings.seed, cli.temperature, cli.top_k, cli.top_p)?;
    let source = corpus.source.display().to_string();
    let text = Arc::new(Text::split(corpus, settings.seq)?);
    let entropy = facts.unigram_entropy;
    println!(
        "corpus {source}: {} files, {} bytes to train on, {} to validate; byte-unigram entropy \
         {entropy:.3} nats",
        facts.files,
        text.train_bytes(),
        text.valid_bytes(),
    );

    let out = cli.out();
    fs::create_dir_all(&out).map_err(Error::io(&out))?;
    report::write_plan(&out, &plan)?;
    let label = |settings: &Settings| {
        if settings.is_dense() {
            "dense"
        } else {
            "sparse"
        }
    };
    let mut variants = vec![settings.clone()];
    if plan.compare && !settings.is_dense() {
        variants.push(settings.dense());
    }
    let (mut curves, mut first_model) = (Vec::new(), None);
    for settings in &variants {
        let label = label(settings);
        let dir = out.join(label);
        let run = train::train(settings, label, &text, &device, &dir, cli.resume)?;
        println!("{}", report::summary(&run.curve, entropy));
        curves.push(run.curve);
        first_model.get_or_insert(run.model);
    }
    report::write_curves(&out, &plan, format!("{device:?}"), &curves)?;
    plot::draw(&out.join("curves.png"), &curves, entropy)?;

    let model = first_model.expect("at least one variant was trained");
    let prompt = match &cli.prompt {
        Some(prompt) if !prompt.is_empty() => prompt.as_bytes(),
        _ => text.prompt(PROMPT_BYTES),
    };
    let options = SampleOptions {
        bytes: cli.sample,
        sampler,
        seq: settings.seq,
    };
    let sampled = sample::sample(&model, prompt, options)?;
    let (prompt, sampled) = (sample::printable(prompt), sample::printable(&sampled));
    let path = out.join("sample.txt");
    fs::write(&path, format!("{prompt}{sampled}\n")).map_err(Error::io(&path))?;
    println!(
        "--- prompt ---\n{prompt}\n--- sampled at temperature {} ---",
        cli.temperature
    );
    println!(
        "{sampled}\n---\nwrote curves.json, curves.png, sample.txt to {}",
        out.display()
    );
    Ok(())
}

/// A new run's plan, or with `--resume` the one written when the run began.
fn plan(cli: &Cli, corpus: &Corpus) -> Result<Plan, Error> {
    let facts = CorpusFacts::of(corpus);
    if !cli.resume {
        let settings = Settings::new(cli)?;
        return Ok(Plan {
            settings,
            corpus: facts,
            compare: cli.compare,
        });
    }
    let plan = report::read_plan(&cli.out())?;
    let path = cli.out().join(report::PLAN);
    let refuse = |reason: &str| {
        Err(Error::Unusable {
            path: path.clone(),
            reason: reason.into(),
        })
    };
    if plan.settings.clone().with(cli)? != plan.settings || (cli.compare && !plan.compare) {
        return refuse("the run has other settings; --resume takes them from here, leave them out");
    }
    if plan.corpus.fingerprint != facts.fingerprint {
        return refuse("the text has changed since the run began");
    }
    Ok(plan)
}

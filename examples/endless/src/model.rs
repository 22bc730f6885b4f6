//! A trained model: from a checkpoint, or trained now.

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::prelude::*;
use burn::store::ModuleRecord;
use clap::Parser;
use flash_dma_models::nn::Decoder;
use train_text::checkpoints;
use train_text::cli::{Cli as TrainCli, Settings};
use train_text::data::{Corpus, Text};
use train_text::device::{DeviceName, DtypeName};
use train_text::error::Error;
use train_text::report::{self, CorpusFacts, Plan};
use train_text::train::{self, Student};

use crate::cli::Cli;

/// A model and what it was trained with.
pub struct Trained {
    pub model: Decoder,
    pub settings: Settings,
}

/// The model of `--checkpoint`, or of `--out`, which is trained first if there is none.
///
/// # Errors
///
/// [`Error`] if the device is not there, or a checkpoint is asked for and cannot be used.
pub fn open(cli: &Cli, corpus: &Corpus) -> Result<Trained, Error> {
    let name = cli.device.unwrap_or(DeviceName::Flex);
    let dtype = cli.dtype.unwrap_or(match name {
        DeviceName::Cuda => DtypeName::Bf16,
        _ => DtypeName::F32,
    });
    let device = name.open(dtype)?;
    if let Some(dir) = &cli.checkpoint {
        return load(dir, dtype, &device)?.ok_or_else(|| Error::Unusable {
            path: dir.clone(),
            reason: "no checkpoint of a `train-text` run".into(),
        });
    }
    if let Some(trained) = load(&cli.out, dtype, &device)? {
        println!("the model that was trained in {}", cli.out.display());
        return Ok(trained);
    }
    println!(
        "no --checkpoint: training a small model in {} first",
        cli.out.display()
    );
    fit(cli, [name.name(), dtype.name()], corpus, &device)?;
    let trained = load(&cli.out, dtype, &device)?;
    Ok(trained.expect("training leaves a checkpoint"))
}

/// The newest checkpoint of a run's sparse model, if there is one.
fn load(dir: &Path, dtype: DtypeName, device: &Device) -> Result<Option<Trained>, Error> {
    let run = dir.join("sparse");
    let Some(epoch) = checkpoints::last(&run) else {
        return Ok(None);
    };
    let settings = report::read_plan(dir)?.settings;
    let settings = Settings { dtype, ..settings };
    let path = run.join("checkpoint").join(format!("model-{epoch}.bpk"));
    let unusable = |reason: String| Error::Unusable {
        path: path.clone(),
        reason,
    };
    let record = ModuleRecord::load(&path).map_err(|error| unusable(error.to_string()))?;
    let model = settings.model().init(device);
    let Student { model } = Student { model }
        .try_load_record(record)
        .map_err(|error| unusable(error.to_string()))?;
    Ok(Some(Trained { model, settings }))
}

/// Trains the demo of `train-text`, for as many steps as are asked for.
fn fit(
    cli: &Cli,
    [device_name, dtype]: [&str; 2],
    corpus: &Corpus,
    device: &Device,
) -> Result<(), Error> {
    let out = &cli.out;
    let (steps, evaluations) = (cli.steps.to_string(), cli.steps.clamp(1, 10).to_string());
    let options = [
        "train-text",
        "--demo",
        "--device",
        device_name,
        "--dtype",
        dtype,
        "--steps",
        &steps,
        "--evaluations",
        &evaluations,
    ];
    let settings = Settings::new(&TrainCli::parse_from(options))?;
    let plan = Plan {
        corpus: CorpusFacts::of(corpus),
        settings: settings.clone(),
        compare: false,
    };
    std::fs::create_dir_all(out).map_err(Error::io(out))?;
    report::write_plan(out, &plan)?;
    let text = Arc::new(Text::split(corpus.clone(), settings.seq)?);
    let run = train::train(
        &settings,
        "sparse",
        &text,
        device,
        &out.join("sparse"),
        false,
    )?;
    println!(
        "{}",
        report::summary(&run.curve, plan.corpus.unigram_entropy)
    );
    Ok(())
}

//! `train-text`: a byte-level language model, from text to text. See `train-text --help`.

use std::error;
use std::fs;
use std::path::{Path, PathBuf};

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use clap::Parser;
use flash_dma_models::data::Vocabulary;
use flash_dma_models::generate::{Generator, Sampler};
use flash_dma_models::nn::{Activations, Decoder, DecoderConfig};
use flash_dma_models::{Evaluated, Reading, TextTraining};

/// An error as one actionable line.
type Error = Box<dyn error::Error + Send + Sync>;

/// Default training texts: chapters of the book.
const CHAPTERS: [&str; 4] = [
    concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../book/src/troubleshooting.md"
    ),
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/decoding.md"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/operation.md"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/intervals.md"),
];

/// Trains a byte-level transformer with dynamic-mask attention on text, and samples from it.
///
/// The defaults train 0.6 million parameters in a few minutes on two cores. Into --out it writes checkpoints, the model
/// with its configuration, and sample.txt.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Text to train on: files, concatenated [default: chapters of this repository's book].
    #[arg(long, value_name = "FILE", num_args = 1.., default_values = CHAPTERS, hide_default_value = true)]
    data: Vec<PathBuf>,
    /// Device to train on.
    #[arg(long, value_parser = ["flex", "cuda", "cpu", "wgpu"], default_value = "flex")]
    device: String,
    /// Which of them share the texts of a step, as `0,1`.
    #[arg(
        long,
        value_name = "NUMBER",
        value_delimiter = ',',
        default_value = "0"
    )]
    devices: Vec<usize>,
    /// Element type of the activations; parameters stay f32.
    #[arg(long, value_parser = ["f32", "f16", "bf16"], default_value = "f32")]
    dtype: String,
    /// Bytes of context.
    #[arg(long, default_value_t = 256)]
    seq: usize,
    /// Keys a query may attend to [default: a quarter of --seq]; --seq or more is dense attention.
    #[arg(long)]
    window: Option<usize>,
    /// Read the texts of a step in parts of this many bytes, for texts that do not fit into memory at once.
    #[arg(long, value_name = "BYTES", conflicts_with = "checkpoint")]
    part: Option<usize>,
    /// The --devices read a part of every text, in place of a share of the texts.
    #[arg(long, conflicts_with_all = ["checkpoint", "part"])]
    context_parallel: bool,
    /// Training steps.
    #[arg(long, default_value_t = 600)]
    steps: usize,
    /// Sequences a step, on all devices together.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Transformer blocks.
    #[arg(long, default_value_t = 3)]
    layers: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 128)]
    d_model: usize,
    /// Query heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Keep only the inputs of the blocks for the backward pass, and recompute the rest: less memory.
    #[arg(long)]
    checkpoint: bool,
    /// Peak learning rate, reached after a linear warm-up and left on a cosine.
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Seed of the parameters, of the data order and of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of validations, each followed by a checkpoint.
    #[arg(long, default_value_t = 10)]
    evaluations: usize,
    /// Output directory.
    #[arg(long, value_name = "DIR", default_value = "runs/train-text")]
    out: PathBuf,
    /// Resume from the last checkpoint in --out; the training must be the same.
    #[arg(long)]
    resume: bool,
    /// Number of bytes to sample at the end.
    #[arg(long, default_value_t = 400)]
    sample: usize,
    /// Sampling temperature; 0 takes the most likely byte.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from this many of the most likely bytes.
    #[arg(long, default_value_t = 256)]
    top_k: usize,
    /// Sample from the fewest most likely bytes whose probabilities reach this sum.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Text the sample continues [default: a piece of its last tenth].
    #[arg(long)]
    prompt: Option<String>,
}

fn main() {
    if let Err(error) = run(&Cli::parse()) {
        eprintln!("train-text: {error}");
        std::process::exit(2);
    }
}

fn run(cli: &Cli) -> Result<(), Error> {
    let (devices, dtype) = places(cli)?;
    sampler(cli, 0).try_check()?;
    let texts = cli.data.iter().map(|path| fs::read(path).map_err(at(path)));
    let text = texts.collect::<Result<Vec<_>, _>>()?.concat();
    let training = TextTraining::new(config(cli, dtype), cli.seq)
        .with_batch(cli.batch)
        .with_reading(reading(cli))
        .with_steps(cli.steps)
        .with_rate(cli.lr)
        .with_seed(cli.seed)
        .with_evaluations(cli.evaluations);
    let see = |at: &Evaluated| {
        let [training, validation] = [f64::from(at.training_loss), at.validation_loss];
        let (step, time) = (at.step, at.time.as_secs());
        println!("step {step}: training {training:.4}, validation {validation:.4}, {time} s");
    };
    let model = match cli.resume {
        true => training.try_resume(&text, &cli.out, &devices, see)?,
        false => training.try_run(&text, &cli.out, &devices, see)?,
    };
    training.model.save(cli.out.join("config.json"))?;
    let record = model.clone().into_record();
    record.save(cli.out.join("model.bpk"))?;

    let prompt = match &cli.prompt {
        Some(prompt) => prompt.as_bytes(),
        None => &text[text.len() - text.len() / 10..][..cli.seq.min(64)],
    };
    let prompt: Vec<u32> = prompt.iter().map(|&byte| byte.into()).collect();
    let written = write(cli, &model, &prompt)?;
    let [prompt, written] = [&prompt, &written].map(|ids| Vocabulary::bytes().decode(ids));
    let (prompt, written) = (prompt?, written?);
    let path = cli.out.join("sample.txt");
    fs::write(&path, format!("{prompt}{written}\n")).map_err(at(&path))?;
    let (temperature, out) = (cli.temperature, cli.out.display());
    println!("--- prompt ---\n{prompt}\n--- sampled at temperature {temperature} ---");
    println!("{written}\n---\nwrote model.bpk and sample.txt to {out}");
    Ok(())
}

fn reading(cli: &Cli) -> Reading {
    match cli.part {
        Some(part) => Reading::InParts(part),
        None if cli.context_parallel => Reading::OverDevices,
        None => Reading::Whole,
    }
}

/// Devices and element type, if this program was built with the devices and they support the type.
fn places(cli: &Cli) -> Result<(Vec<Device>, FloatDType), Error> {
    let open = |&number: &usize| match (cli.device.as_str(), number) {
        // The processor is one device, whatever its number.
        #[cfg(feature = "flex")]
        ("flex", _) => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        ("cuda", number) => Ok(Device::cuda(number)),
        #[cfg(feature = "cpu")]
        ("cpu", _) => Ok(Device::cpu()),
        #[cfg(feature = "wgpu")]
        ("wgpu", 0) => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "wgpu")]
        ("wgpu", number) => Ok(Device::wgpu(burn::tensor::DeviceKind::DiscreteGpu(number))),
        (name, _) => {
            let reason = "is not compiled in: build with --features";
            Err(format!("--device {name} {reason} {name}"))
        }
    };
    let devices = cli
        .devices
        .iter()
        .map(open)
        .collect::<Result<Vec<_>, _>>()?;
    let dtype = match cli.dtype.as_str() {
        "bf16" => FloatDType::BF16,
        "f16" => FloatDType::F16,
        _ => FloatDType::F32,
    };
    match devices.iter().all(|device| device.supports_dtype(dtype)) {
        true => Ok((devices, dtype)),
        false => Err(format!("--device {} does not support {dtype:?}", cli.device).into()),
    }
}

/// The model: the default layer, which keeps the keys that its scores rank highest and adds nothing to the logits.
fn config(cli: &Cli, dtype: FloatDType) -> DecoderConfig {
    let window = cli.window.unwrap_or(cli.seq.div_ceil(4));
    let activations = match cli.checkpoint {
        true => Activations::Recomputed,
        false => Activations::Kept,
    };
    let attention = DynamicMaskAttentionConfig::new(cli.d_model, cli.heads)
        .with_n_kv_heads(Some(cli.kv_heads))
        .with_rope(Some(Rope::new(cli.seq)))
        .with_selection(Selection::keep(window));
    DecoderConfig::new(attention, cli.layers)
        .with_dtype(dtype)
        .with_activations(activations)
}

fn sampler(cli: &Cli, written: usize) -> Sampler {
    Sampler::random(cli.seed + written as u64)
        .with_temperature(cli.temperature)
        .with_top_k(cli.top_k)
        .with_top_p(cli.top_p)
}

/// Generates bytes after a prompt. The model has seen no position past --seq, so there it starts again from the last
/// half of the context.
fn write(cli: &Cli, model: &Decoder, prompt: &[u32]) -> Result<Vec<u32>, Error> {
    let model = model.for_generation();
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + cli.sample {
        let written = text.len() - prompt.len();
        let context = text[text.len().saturating_sub(cli.seq.div_ceil(2))..].to_vec();
        let count = (cli.seq - context.len()).clamp(1, cli.sample - written);
        let generator = Generator::new(&model).with_sampler(sampler(cli, written));
        let texts = generator.with_max_new(count).try_generate(&[context])?;
        text.extend(&texts[0].tokens);
    }
    Ok(text.split_off(prompt.len()))
}

/// The error of an operation on a file or a folder.
fn at<E: error::Error>(path: &Path) -> impl Fn(E) -> Error {
    move |error| format!("{}: {error}", path.display()).into()
}

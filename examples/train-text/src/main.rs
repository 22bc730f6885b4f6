//! `train-text`: a byte-level language model, from text to text. See `train-text --help`.

use std::error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use burn::config::Config;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use burn_flash_dma::train::clip_gradients;
use clap::Parser;
use flash_dma_models::LanguageModel;
use flash_dma_models::data::{
    Batch, Loader, LoaderState, PackedRows, Row, TokenFileWriter, Vocabulary,
};
use flash_dma_models::generate::{Generator, Sampler};
use flash_dma_models::nn::{Activations, Decoder, DecoderConfig, TokenInput};
use serde_json::json;

/// What went wrong, as one line for a person to act on.
type Error = Box<dyn error::Error + Send + Sync>;

/// What is trained on unless --data is given.
const CHAPTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/learning.md");

/// Trains a byte-level transformer with dynamic-mask attention on text, and samples from it.
///
/// The defaults train 0.6 million parameters in a few minutes on two cores. Into --out it writes checkpoints, the model
/// with its configuration, and sample.txt.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Text to train on: files, one behind the other [default: a chapter of this repository's book].
    #[arg(long, value_name = "FILE", num_args = 1.., default_value = CHAPTER, hide_default_value = true)]
    data: Vec<PathBuf>,
    /// Device to train on.
    #[arg(long, value_parser = ["flex", "cuda", "cpu", "wgpu"], default_value = "flex")]
    device: String,
    /// Element type of the activations; parameters stay f32.
    #[arg(long, value_parser = ["f32", "f16", "bf16"], default_value = "f32")]
    dtype: String,
    /// Bytes of context.
    #[arg(long, default_value_t = 256)]
    seq: usize,
    /// Keys a query may attend to [default: a quarter of --seq]; --seq or more is dense attention.
    #[arg(long)]
    window: Option<usize>,
    /// Training steps.
    #[arg(long, default_value_t = 600)]
    steps: usize,
    /// Sequences a step.
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
    /// Keep only the inputs of the blocks for the backward pass, and compute the rest a second time: less memory.
    #[arg(long)]
    checkpoint: bool,
    /// Peak learning rate, reached after a linear warm-up and left on a cosine.
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Seed of the parameters, of the data order and of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How often to validate and to write a checkpoint.
    #[arg(long, default_value_t = 10)]
    evaluations: usize,
    /// Where to write.
    #[arg(long, value_name = "DIR", default_value = "runs/train-text")]
    out: PathBuf,
    /// Go on from the last checkpoint in --out; what is trained must be what it was.
    #[arg(long)]
    resume: bool,
    /// Bytes to sample at the end.
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
    /// Text the sample continues [default: the beginning of the validation text].
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
    let (device, dtype) = place(cli)?;
    let config = config(cli, dtype)?;
    sampler(cli, 0).try_check()?;
    let (train, valid) = rows(cli)?;
    let (rows, kept, seq) = (train.len(), valid.len(), cli.seq);
    println!("{rows} rows of {seq} bytes to train on, {kept} to validate");
    let model = fit(cli, &config, train, &valid, &device)?;
    config.save(cli.out.join("config.json"))?;
    let record = model.clone().into_record();
    record.save(cli.out.join("model.bpk"))?;

    let prompt = match &cli.prompt {
        Some(prompt) => Vocabulary::bytes().encode(prompt)?,
        None => valid.row(0)?.inputs()[..cli.seq.min(64)].to_vec(),
    };
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

/// The device and the element type, if this program was built with the one and it computes in the other.
fn place(cli: &Cli) -> Result<(Device, FloatDType), Error> {
    let device = match cli.device.as_str() {
        #[cfg(feature = "flex")]
        "flex" => Device::flex(),
        #[cfg(feature = "cuda")]
        "cuda" => Device::cuda(0),
        #[cfg(feature = "cpu")]
        "cpu" => Device::cpu(),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        name => {
            let reason = "is not compiled in: build with --features";
            return Err(format!("--device {name} {reason} {name}").into());
        }
    };
    let dtype = match cli.dtype.as_str() {
        "bf16" => FloatDType::BF16,
        "f16" => FloatDType::F16,
        _ => FloatDType::F32,
    };
    match device.supports_dtype(dtype) {
        true => Ok((device, dtype)),
        false => Err(format!("--device {} does not support {dtype:?}", cli.device).into()),
    }
}

/// Cuts the text into up to sixteen blocks of equal length, of each of which the last tenth is for validation, and these
/// into rows. So validation text comes from all over, and no row to train on reaches into it.
fn rows(cli: &Cli) -> Result<(PackedRows, PackedRows), Error> {
    let texts = cli.data.iter().map(|path| fs::read(path).map_err(at(path)));
    let text = texts.collect::<Result<Vec<_>, _>>()?.concat();
    let (len, needed) = (text.len(), 10 * (cli.seq + 1));
    if len < needed {
        let seq = cli.seq;
        return Err(format!("{len} bytes are too few for --seq {seq}: it takes {needed}").into());
    }
    // The validation text of a block has four rows, if the text is as long.
    let blocks = (len / (4 * needed)).clamp(1, 16);
    let (mut train, mut valid) = (Vec::new(), Vec::new());
    for block in 0..blocks {
        let (start, end) = (block * len / blocks, (block + 1) * len / blocks);
        let cut = end - (end - start) / 10;
        train.push(&text[start..cut]);
        valid.push(&text[cut..end]);
    }
    fs::create_dir_all(&cli.out).map_err(at(&cli.out))?;
    let mut writer = TokenFileWriter::create(cli.out.join("tokens"), 256)?;
    for part in train.into_iter().chain(valid) {
        let ids: Vec<u32> = part.iter().map(|&byte| byte.into()).collect();
        writer.push(&ids)?;
    }
    let file = Arc::new(writer.finish()?);
    let train = PackedRows::of(file.clone(), 0..blocks, cli.seq)?;
    Ok((train, PackedRows::of(file, blocks..2 * blocks, cli.seq)?))
}

/// The model: the default layer, which keeps the keys that its scores rank highest and adds nothing to the logits.
fn config(cli: &Cli, dtype: FloatDType) -> Result<DecoderConfig, Error> {
    let window = cli.window.unwrap_or(cli.seq.div_ceil(4));
    let sizes = [cli.seq, window, cli.batch, cli.layers, cli.evaluations];
    let rate = cli.lr > 0.0 && cli.lr <= 1.0;
    if sizes.contains(&0) || !rate || cli.steps < cli.evaluations {
        let rate = "--lr above 0 and at most 1, --steps at least --evaluations";
        return Err(format!("sizes and counts must be at least 1, {rate}").into());
    }
    let activations = match cli.checkpoint {
        true => Activations::Recomputed,
        false => Activations::Kept,
    };
    let attention = DynamicMaskAttentionConfig::new(cli.d_model, cli.heads)
        .with_n_kv_heads(Some(cli.kv_heads))
        .with_rope(Some(Rope::new(cli.seq)))
        .with_selection(Selection::keep(window));
    Ok(DecoderConfig::new(attention, cli.layers)
        .with_dtype(dtype)
        .with_activations(activations))
}

/// Trains, or goes on from the last checkpoint.
fn fit(
    cli: &Cli,
    config: &DecoderConfig,
    train: PackedRows,
    valid: &PackedRows,
    device: &Device,
) -> Result<Decoder, Error> {
    device.seed(cli.seed);
    let mut model = config.try_init(&device.clone().autodiff())?;
    let mut optimiser = AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init();
    let loader = Loader::new(train, cli.batch, cli.seed, device)?;
    let (steps, lr, evaluations) = (cli.steps, cli.lr, cli.evaluations);
    let settings = json!({"model": config, "steps": steps, "lr": lr, "evaluations": evaluations});
    let settings = settings.to_string();
    (model, optimiser) = begin(cli, &settings, model, optimiser, &loader)?;
    let (done, start) = (loader.state().step, Instant::now());
    let mut epoch = loader.iter();
    let (mut losses, mut evaluations) = (Vec::new(), done * cli.evaluations / cli.steps);
    for step in done..cli.steps {
        let batch = match epoch.next() {
            Some(batch) => batch?,
            None => {
                epoch = loader.iter();
                epoch.next().expect("an epoch has a batch")?
            }
        };
        let (input, weights) = (input(&batch), Some(batch.weights));
        let (loss, backward) = model.try_loss_and_backward(input, batch.targets, weights)?;
        let mut gradients = backward();
        clip_gradients(&model, &mut gradients, 1.0);
        model = optimiser.step(rate(cli, step), model, gradients);
        losses.push(loss.detach());
        if (step + 1) * cli.evaluations / cli.steps > evaluations {
            evaluations += 1;
            let training = Tensor::cat(std::mem::take(&mut losses), 0).mean();
            let loss = training.into_scalar::<f32>();
            let validation = validate(&model.valid(), valid, cli.batch)?;
            let (step, time) = (step + 1, start.elapsed().as_secs());
            println!("step {step}: training {loss:.4}, validation {validation:.4}, {time} s");
            save(cli, &settings, &model, &optimiser, &loader.state())?;
        }
    }
    Ok(model.valid())
}

/// What the model reads: no byte sees another block of the text.
fn input(batch: &Batch) -> TokenInput {
    TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone())
}

/// A linear warm-up in a twentieth of the steps, then a cosine down to a tenth of the peak.
fn rate(cli: &Cli, step: usize) -> f64 {
    let warm_up = cli.steps.div_ceil(20);
    if step < warm_up {
        return cli.lr * (step + 1) as f64 / warm_up as f64;
    }
    let done = (step - warm_up) as f64 / (cli.steps - warm_up) as f64;
    cli.lr * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
}

/// The mean loss of at most 64 rows, evenly spread.
fn validate(model: &Decoder, rows: &PackedRows, size: usize) -> Result<f64, Error> {
    let kept = rows.len().min(64);
    let spread = |at: usize| rows.row(at * rows.len() / kept);
    let rows: Result<Vec<Row>, _> = (0..kept).map(spread).collect();
    let (mut sum, mut count) = (0.0, 0);
    for rows in rows?.chunks(size) {
        let batch = Batch::new(rows, &model.device());
        let losses = model.try_token_losses(input(&batch), batch.targets.clone())?;
        let mean = batch.mean(losses.flatten(0, 1)).into_scalar::<f32>();
        sum += f64::from(mean) * batch.predicted() as f64;
        count += batch.predicted();
    }
    Ok(sum / count.max(1) as f64)
}

/// Where the checkpoints of a run are, by their steps.
fn checkpoints(out: &Path) -> Vec<(usize, PathBuf)> {
    let step = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let step = name.strip_prefix("checkpoint-")?.parse().ok()?;
        Some((step, entry.path()))
    };
    let entries = fs::read_dir(out).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.filter_map(step).collect();
    found.sort();
    found
}

/// A new run, without what an earlier one has left, or with --resume one at its last checkpoint.
fn begin(
    cli: &Cli,
    settings: &str,
    model: Decoder,
    optimiser: ModuleOptimizer,
    loader: &Loader,
) -> Result<(Decoder, ModuleOptimizer), Error> {
    if !cli.resume {
        for (_, dir) in checkpoints(&cli.out) {
            fs::remove_dir_all(&dir).map_err(at(&dir))?;
        }
        return Ok((model, optimiser));
    }
    let last = checkpoints(&cli.out).pop();
    let (_, dir) = last.ok_or("--resume: no checkpoint in --out")?;
    let path = dir.join("state.json");
    let saved = fs::read_to_string(&path).map_err(at(&path))?;
    let (then, state): (String, LoaderState) = serde_json::from_str(&saved).map_err(at(&path))?;
    if then != settings {
        return Err(format!("--resume: the run was of {then}").into());
    }
    loader.resume(&state)?;
    let record = ModuleRecord::load(dir.join("model.bpk"))?;
    let optimiser = optimiser.load_record(OptimizerRecord::load(dir.join("optimiser.bpk"))?);
    Ok((model.try_load_record(record)?, optimiser))
}

/// Writes a checkpoint, which has its name once it is whole, and removes those before the last two.
fn save(
    cli: &Cli,
    settings: &str,
    model: &Decoder,
    optimiser: &ModuleOptimizer,
    state: &LoaderState,
) -> Result<(), Error> {
    let dir = cli.out.join("partial");
    fs::create_dir_all(&dir).map_err(at(&dir))?;
    model.clone().into_record().save(dir.join("model.bpk"))?;
    optimiser.to_record().save(dir.join("optimiser.bpk"))?;
    let path = dir.join("state.json");
    fs::write(&path, serde_json::to_string(&(settings, state))?).map_err(at(&path))?;
    let whole = cli.out.join(format!("checkpoint-{}", state.step));
    fs::rename(&dir, whole).map_err(at(&dir))?;
    let mut found = checkpoints(&cli.out);
    found.truncate(found.len().saturating_sub(2));
    for (_, dir) in found {
        fs::remove_dir_all(&dir).map_err(at(&dir))?;
    }
    Ok(())
}

fn sampler(cli: &Cli, written: usize) -> Sampler {
    Sampler::random(cli.seed + written as u64)
        .with_temperature(cli.temperature)
        .with_top_k(cli.top_k)
        .with_top_p(cli.top_p)
}

/// The bytes that follow a prompt. The model has seen no position past --seq, so there it begins again with the last
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

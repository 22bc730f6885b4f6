//! `endless`: alternates reading and writing, and measures the cost. See `endless --help`.

use std::error;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::config::Config;
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_flash_dma::cache::AttentionCache;
use clap::Parser;
use flash_dma_models::LanguageModel;
use flash_dma_models::data::Vocabulary;
use flash_dma_models::generate::{Draw, Purpose, Sampler};
use flash_dma_models::nn::{Decoder, DecoderConfig};
use serde::Serialize;

/// An error as one actionable line.
type Error = Box<dyn error::Error + Send + Sync>;

/// Factor of the context from one stop to the next.
const GROWTH: usize = 4;

/// Bytes of the text read first, unless `--prompt` is given.
const PROMPT: usize = 256;

/// Lets a trained byte-level model read and write without end, and shows that neither its speed nor its memory
/// depends on how much it has read.
///
/// The model reads the prompt and writes a stretch of text; then it reads on in its own text up to 4 times that
/// context, writes again, and so on up to --context. It reads in chunks, like training, and writes byte by byte.
/// Every byte written is drawn from the keys that the layers' windows keep, exactly those that attention over the
/// whole context would select.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Directory of a `train-text` run that has ended: its --out.
    #[arg(long, value_name = "DIR", default_value = "runs/train-text")]
    checkpoint: PathBuf,
    /// Text to read, over and over.
    #[arg(long, value_name = "FILE", default_value = "README.md")]
    data: PathBuf,
    /// Device.
    #[arg(long, value_parser = ["flex", "cuda", "cpu", "wgpu"], default_value = "flex")]
    device: String,
    /// Element type of the activations and of the caches [default: f32, on cuda bf16].
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    dtype: Option<String>,
    /// Maximum context in bytes.
    #[arg(long, default_value_t = 65536)]
    context: usize,
    /// Bytes to write at each stop.
    #[arg(long, default_value_t = 256)]
    write: usize,
    /// Number of bytes read at once.
    #[arg(long, default_value_t = 2048)]
    chunk: usize,
    /// Write everything, and read only the prompt. A stop is then only a line.
    #[arg(long)]
    write_only: bool,
    /// Text to begin with [default: the beginning of the text].
    #[arg(long)]
    prompt: Option<String>,
    /// Divides the logits; 0 takes the most likely byte.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw from this many of the most likely bytes.
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Draw from the fewest most likely bytes whose probabilities reach this sum.
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Show the measurements only.
    #[arg(long)]
    quiet: bool,
    /// Write the measurements to this file, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measurements at a stop.
#[derive(Debug, Serialize)]
struct Stop {
    /// Bytes read and written before the stretch.
    context: usize,
    /// Bytes read a second since the last stop, in chunks.
    read_per_second: Option<f64>,
    /// Bytes of the stretch.
    written: usize,
    /// Median time to write a byte: the model's step, the copy of the logits to the host and the draw.
    milliseconds_a_byte: Option<f64>,
    /// Bytes of all caches.
    cache_bytes: usize,
    /// Bytes in use and bytes reserved on the device, parameters included, if it reports them.
    device_bytes: Option<[u64; 2]>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("endless: {error}");
            ExitCode::from(2)
        }
    }
}

/// Reads and writes up to the requested context.
fn run(cli: &Cli) -> Result<(), Error> {
    if cli.chunk == 0 || cli.context == 0 {
        return Err("--chunk and --context must be at least 1".into());
    }
    let sampler = Sampler::random(cli.seed)
        .with_temperature(cli.temperature)
        .with_top_k(cli.top_k)
        .with_top_p(cli.top_p);
    sampler.try_check()?;
    let text = std::fs::read(&cli.data);
    let text = text.map_err(|error| format!("{}: {error}", cli.data.display()))?;
    let prompt = cli.prompt.as_deref().map(str::as_bytes);
    if text.is_empty() || prompt.is_some_and(<[u8]>::is_empty) {
        return Err("the text and --prompt must not be empty".into());
    }
    let mut json = cli.json.as_ref().map(File::create).transpose()?;
    let mut session = Session::new(open(cli)?, &text, sampler)?;
    session.warm_up(cli.chunk)?;
    match prompt {
        Some(prompt) => session.read(prompt)?,
        None => session.read_to(PROMPT.min(cli.context), cli.chunk)?,
    }
    println!(
        "   context |  read B/s | written | ms/byte | bytes/s | cache bytes | device MiB in use, reserved"
    );
    let mut target = session.context.max(1024);
    loop {
        let (before, start) = (session.context, Instant::now());
        if !cli.write_only {
            session.read_to(target.min(cli.context), cli.chunk)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let context = session.context;
        let count = match cli.write_only {
            true => target.min(cli.context).saturating_sub(context),
            false => cli.write,
        };
        let times = session.write(cli, count)?;
        let usage = session.model.device().memory_pool_usage();
        let stop = Stop {
            context,
            read_per_second: (context > before).then(|| (context - before) as f64 / seconds),
            written: times.len(),
            milliseconds_a_byte: median(times),
            cache_bytes: session.caches.iter().map(AttentionCache::bytes).sum(),
            device_bytes: usage.map(|usage| [usage.bytes_in_use, usage.bytes_reserved]),
        };
        println!("{}", row(&stop));
        if let Some(file) = &mut json {
            writeln!(file, "{}", serde_json::to_string(&stop)?)?;
        }
        if session.context >= cli.context {
            return Ok(());
        }
        target = target.max(context) * GROWTH;
    }
}

/// The model of a run, for generation.
fn open(cli: &Cli) -> Result<Decoder, Error> {
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
    let dtype = match (cli.dtype.as_deref(), cli.device.as_str()) {
        (Some("bf16"), _) | (None, "cuda") => FloatDType::BF16,
        (Some("f16"), _) => FloatDType::F16,
        _ => FloatDType::F32,
    };
    if !device.supports_dtype(dtype) {
        return Err(format!("--device {} does not support {dtype:?}", cli.device).into());
    }
    let folder = cli.checkpoint.display();
    let no_run = |_| format!("{folder}: no `train-text` run that has ended");
    let config = DecoderConfig::load(cli.checkpoint.join("config.json")).map_err(no_run)?;
    let record = ModuleRecord::load(cli.checkpoint.join("model.bpk"))?;
    let model = config.with_dtype(dtype).init(&device);
    let model = model.try_load_record(record)?.for_generation();
    let attention = &model.config().attention;
    println!(
        "{} layers, window {}, {dtype:?}; trained on contexts of {} bytes. Further on attention is as exact and as \
         fast, but the text is only as good as that training: it never saw such positions, nor ranked so many keys.",
        model.blocks.len(),
        attention.selection.window.unwrap_or(0),
        (attention.rope.as_ref()).map_or(0, |rope| rope.positions),
    );
    Ok(model)
}

/// A model in the middle of a text. Each layer keeps only the window's keys, so a byte costs the same after a hundred
/// bytes and after a million.
struct Session<'a> {
    model: Decoder,
    caches: Vec<AttentionCache>,
    text: &'a [u8],
    sampler: Sampler,
    /// Bytes read, including those written.
    context: usize,
    /// Logits of the next byte.
    logits: Vec<f32>,
    /// Bytes drawn.
    drawn: usize,
}

impl<'a> Session<'a> {
    fn new(model: Decoder, text: &'a [u8], sampler: Sampler) -> Result<Self, Error> {
        Ok(Self {
            caches: model.try_init_caches(1)?,
            model,
            text,
            sampler,
            context: 0,
            logits: Vec::new(),
            drawn: 0,
        })
    }

    /// Compiles the kernels of reading and writing, so that the times exclude that.
    fn warm_up(&mut self, chunk: usize) -> Result<(), Error> {
        for count in [chunk, 1, 1, chunk] {
            self.read(&vec![b' '; count])?;
        }
        self.caches.iter_mut().for_each(|cache| cache.reset(0));
        self.context = 0;
        Ok(())
    }

    /// Submits bytes to the device, without waiting for it.
    fn enqueue(&mut self, bytes: &[u8]) -> Result<Tensor<3>, Error> {
        let tokens: Vec<i32> = bytes.iter().map(|&byte| byte.into()).collect();
        let tokens = TensorData::new(tokens, [1, bytes.len()]);
        let tokens = Tensor::from_data(tokens, &self.model.device());
        self.context += bytes.len();
        Ok(self.model.try_read(tokens, 1, &mut self.caches)?)
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.logits = self.enqueue(bytes)?.try_into_vec_as::<f32>()?;
        Ok(())
    }

    /// Reads the text up to a context of `target` bytes, waiting for the device only at the end.
    fn read_to(&mut self, target: usize, chunk: usize) -> Result<(), Error> {
        let mut last = None;
        while self.context < target {
            let count = (target - self.context).min(chunk);
            let at = self.context % self.text.len();
            let rest = self.text.iter().cycle().skip(at);
            let bytes: Vec<u8> = rest.take(count).copied().collect();
            last = Some(self.enqueue(&bytes)?);
        }
        if let Some(logits) = last {
            self.logits = logits.try_into_vec_as::<f32>()?;
        }
        Ok(())
    }

    /// Writes `count` bytes, and returns the seconds that each took.
    fn write(&mut self, cli: &Cli, count: usize) -> Result<Vec<f64>, Error> {
        let vocabulary = Vocabulary::bytes();
        let (mut times, mut shown) = (Vec::with_capacity(count), vocabulary.stream());
        for _ in 0..count {
            let start = Instant::now();
            let draw = Draw {
                sequence: 0,
                token: self.drawn,
                purpose: Purpose::Token,
            };
            let law = self.sampler.try_distribution(&self.logits, &[])?;
            let token = law.at(self.sampler.unit(draw));
            self.drawn += 1;
            self.read(&[u8::try_from(token)?])?;
            times.push(start.elapsed().as_secs_f64());
            if !cli.quiet {
                // A terminal would obey control characters.
                let replace = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
                print!("{}", shown.push(token)?.replace(replace, "\u{fffd}"));
                // A closed terminal shows nothing, which is no reason to stop measuring.
                std::io::stdout().flush().ok();
            }
        }
        if !cli.quiet {
            println!("{}", shown.finish()?);
        }
        Ok(times)
    }
}

fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).map(|seconds| seconds * 1e3)
}

fn row(stop: &Stop) -> String {
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
    };
    let mebibytes = |[in_use, reserved]: [u64; 2]| {
        let [in_use, reserved] = [in_use, reserved].map(|bytes| bytes as f64 / f64::from(1 << 20));
        format!("{in_use:.1}, {reserved:.1}")
    };
    let device = stop.device_bytes.map_or_else(|| "-".into(), mebibytes);
    let per_second = stop.milliseconds_a_byte.map(|time| 1e3 / time);
    format!(
        "{:>10} | {:>9} | {:>7} | {:>7} | {:>7} | {:>11} | {device}",
        stop.context,
        number(stop.read_per_second, 0),
        stop.written,
        number(stop.milliseconds_a_byte, 3),
        number(per_second, 0),
        stop.cache_bytes
    )
}

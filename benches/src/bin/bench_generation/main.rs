//! Generation as a Burn user waits for it: the model of `bench-step` reads a prompt in chunks, then writes the most
//! likely token again and again. `benches/generate_peer.py` times the same model in PyTorch, with dense attention.
//!
//! Every process times one configuration; a row is one line of JSON. A token is timed in several ways, each from the
//! caches that the prompt has left:
//!
//! - `queued`: tokens are fed back on the device, and the host waits after the last;
//! - `token_read`: the same, but the host waits for each token, as one that shows the text does;
//! - `logits_read`: the host waits for the logits, chooses the token and uploads it, as one that samples does;
//! - `enqueue`: until the call has returned, from an idle device, without the driver's part, on a thread of CubeCL's;
//! - `generated`: a `Generator` hands out each token, which waits for it; its steps are launched;
//! - `generated_replayed`: the same, with steps that a graph of the device replays;
//! - `replayed`: one token captured in a graph of the device, again and again at its one position.
//!
//! One more token runs with a measurement around each kernel. So that no kernel's time has the host's in it, work that
//! keeps the device busy is queued first (`--busy`). `span_ms` is the time from the first kernel's begin to the last
//! one's end; if it is much more than the sum, the device still waited for the host. Each time has that of an
//! event in it: `benches/ncu_token.py` runs this program below `ncu`, with `--count-only`, for the kernels' own times.
//!
//! ```text
//! cargo build --profile gpu -p flash-dma-benches --bin bench-generation --no-default-features --features extension
//! bench-generation --prompt 32768 --window 2048 --batch 8 --json generation.jsonl
//! ```
//!
//! With `--features extension,fusion` Burn fuses; a row's `backend` says which it was.
//!
//! The rotary tables reach as far as the program goes, unless `--context` says otherwise: positions past a table are
//! computed in every layer of every token.

mod row;
mod session;
mod timing;

use burn::tensor::Device;
use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreForm};
use clap::Parser;
use flash_dma_benches::device::{DeviceName, DtypeName};
use flash_dma_benches::launches::{Launches, Watch};
use flash_dma_models::nn::DecoderConfig;
use row::{Counts, Row};
use serde::Serialize;
use session::{Prompt, Session};
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

/// Times the tokens of one configuration, and prints a row of JSON.
#[derive(Clone, Debug, Parser, Serialize)]
struct Options {
    /// Transformer blocks.
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 1024)]
    d_model: usize,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Keys that a query attends to; all of them if left out.
    #[arg(long)]
    window: Option<usize>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 8192)]
    prompt: usize,
    /// Tokens of each prompt that are read at once.
    #[arg(long, default_value_t = 1024)]
    chunk: usize,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Element type of the parameters, the activations and the caches.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeName,
    /// Device.
    #[arg(long, value_enum, default_value = "cuda")]
    device: DeviceName,
    /// Tokens of a run.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Runs whose tokens are queued, and of replays; those of which each token is timed run once.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Tokens before each run that is timed.
    #[arg(long, default_value_t = 8)]
    warm_up: usize,
    /// Positions of the rotary tables; all that are reached if left out.
    #[arg(long)]
    context: Option<usize>,
    /// Products of two square matrices of 8192 that keep the device busy while the token is queued whose kernels are
    /// timed; 16 on CUDA and none elsewhere if left out.
    #[arg(long)]
    #[serde(skip)]
    busy: Option<usize>,
    /// Leaves out the token whose kernels are timed.
    #[arg(long)]
    #[serde(skip)]
    no_profile: bool,
    /// Leaves out the captured token.
    #[arg(long)]
    #[serde(skip)]
    no_graph: bool,
    /// Kernels to list, the slowest first.
    #[arg(long, default_value_t = 24)]
    #[serde(skip)]
    kernels: usize,
    /// Times nothing: prints how many kernels are launched before the first token behind the warm-up, and by it.
    #[arg(long)]
    #[serde(skip)]
    count_only: bool,
    /// The commit that was built, for the row.
    #[arg(long, default_value = option_env!("FLASH_DMA_COMMIT").unwrap_or("unknown"))]
    commit: String,
    /// A file to append the row to.
    #[arg(long)]
    #[serde(skip)]
    json: Option<PathBuf>,
}

impl Options {
    fn check(&self) -> Result<(), &'static str> {
        if [self.tokens, self.runs, self.chunk, self.batch].contains(&0) {
            return Err("--tokens, --runs, --chunk and --batch must be at least 1");
        }
        if self.prompt == 0 {
            return Err("--prompt must be at least 1");
        }
        Ok(())
    }

    /// The positions that the longest of the runs reaches.
    fn positions(&self) -> usize {
        // A capture runs the token up to five times.
        self.prompt + self.warm_up + self.runs * self.tokens + 5
    }

    fn model(&self) -> DecoderConfig {
        let context = self.context.unwrap_or_else(|| self.positions());
        let attention = DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_score_form(ScoreForm::Zoh)
            .with_score_role(Some(ScoreRole::RankAndBias))
            .with_keep_window(Some(self.window.unwrap_or_else(|| self.positions())))
            .with_max_seq_len(Some(context));
        DecoderConfig::new(attention, self.layers).with_dtype(self.dtype.burn())
    }

    fn busy(&self) -> usize {
        let default = match self.device {
            DeviceName::Cuda => 16,
            _ => 0,
        };
        self.busy.unwrap_or(default)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    options.check()?;
    let launches = Launches::watch(match options.count_only {
        true => Watch::Count,
        false => Watch::Nothing,
    });
    let device = options.device.open(options.dtype)?;
    device.seed(0);
    let line = if options.count_only {
        serde_json::to_string(&count(&options, &launches, &device)?)?
    } else {
        drop(launches);
        serde_json::to_string(&measure(&options, &device)?)?
    };
    println!("{line}");
    if let Some(path) = &options.json {
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)?;
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// The launches up to the first token behind the warm-up, and its own.
fn count(
    options: &Options,
    launches: &Launches,
    device: &Device,
) -> Result<Counts, Box<dyn Error>> {
    let model = options.model().init(device).for_generation();
    let prompt = Prompt::new(options, device);
    let mut session = Session::new(&model, options.batch)?;
    session.read(&prompt)?;
    session.steps(options.warm_up)?;
    device.sync()?;
    let before = launches.take().launched;
    session.step()?;
    device.sync()?;
    Ok(Counts {
        before,
        token: launches.take().launched,
    })
}

fn measure(options: &Options, device: &Device) -> Result<Row, Box<dyn Error>> {
    let model = options.model().init(device).for_generation();
    device.sync()?;
    let prompt = Prompt::new(options, device);
    // The first reading compiles.
    let mut first_session = Session::new(&model, options.batch)?;
    let first_prompt_ms = timing::clock(device, || first_session.read(&prompt))?;
    drop(first_session);
    let mut session = Session::new(&model, options.batch)?;
    let prompt_ms = timing::clock(device, || session.read(&prompt))?;
    let times = timing::Times::of(&session, &model, &prompt, options, device)?;
    Ok(Row::new(
        options,
        device,
        &session,
        [first_prompt_ms, prompt_ms],
        times,
    ))
}

//! `endless`: see `endless --help`, and `run.rs` for the loop.

mod model;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use train_text::device::{DeviceName, DtypeName};
use train_text::error::Error;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.check().and_then(|()| run::run(&cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("endless: {error}");
            ExitCode::from(2)
        }
    }
}

/// Lets a trained byte-level model read and write without end, and shows that neither its speed nor its memory
/// depends on how much it has read.
///
/// The model reads the prompt and writes a stretch of text; then it reads on in its own text corpus up to a context of
/// 4 times the length, writes again, and so on up to --context. Reading is done in chunks, like training;
/// writing byte by byte. Every byte written is drawn from what the layers kept of everything before it:
/// the keys of the window, exactly those that attention over the whole context would select.
///
/// Without --checkpoint it trains a small model first, for two minutes on two cores with the default --steps, and keeps
/// it in --out.
#[derive(Debug, Clone, Parser)]
#[command(version)]
struct Cli {
    /// Directory of a `train-text` run: its --out.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Where a model is trained if there is no --checkpoint, or found if it has been.
    #[arg(long, value_name = "DIR", default_value = "runs/endless")]
    out: PathBuf,
    /// Steps that a model is trained for if there is none.
    #[arg(long, default_value_t = 600)]
    steps: usize,
    /// Text to train on and to read: a file, or every UTF-8 file under a directory [default: this repository].
    #[arg(long, value_name = "FILE|DIR")]
    data: Option<PathBuf>,
    /// Device [default: flex].
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Element type of the activations and of the caches [default: f32, on cuda bf16].
    #[arg(long, value_enum)]
    dtype: Option<DtypeName>,
    /// Bytes of context to go to.
    #[arg(long, default_value_t = 65536)]
    context: usize,
    /// Bytes to write at each stop.
    #[arg(long, default_value_t = 256)]
    write: usize,
    /// Bytes that are read at once.
    #[arg(long, default_value_t = 2048)]
    chunk: usize,
    /// Write everything, read nothing but the prompt. A stop is then only a line.
    #[arg(long)]
    write_only: bool,
    /// Text to begin with [default: the beginning of the validation text].
    #[arg(long)]
    prompt: Option<String>,
    /// Divides the logits; 0 takes the most likely byte.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw from this many of the most likely bytes; 0 is all of them.
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

impl Cli {
    /// Refuses what cannot be done.
    fn check(&self) -> Result<(), Error> {
        let refused = if self.chunk == 0 || self.context == 0 {
            "--chunk and --context must be at least 1"
        } else if !self.temperature.is_finite() || self.temperature < 0.0 {
            "--temperature must be at least 0"
        } else if !(0.0..=1.0).contains(&self.top_p) {
            "--top-p must be between 0 and 1"
        } else if self.prompt.as_ref().is_some_and(String::is_empty) {
            "--prompt must not be empty"
        } else {
            return Ok(());
        };
        Err(Error::Options(refused.into()))
    }
}

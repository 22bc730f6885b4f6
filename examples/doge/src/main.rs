//! `doge`: writes, trains and serves with a Doge in Hugging Face's files. See `doge --help`.

mod check;
mod fine_tune;
mod fresh;
mod serve;
mod write;

use std::error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::{Device, FloatDType};
use clap::{Args, Parser};
use flash_dma_models::data::{DataError, TextStream, Vocabulary};
use flash_dma_models::doge::Doge;
use flash_dma_models::generate::{
    Event, GenerateError, Generated, Generator, ModelDraft, PromptLookup, Sampler, Speculation,
};

/// An error as one actionable line.
type Error = Box<dyn error::Error + Send + Sync>;

/// Writes, trains and serves with a Doge in Hugging Face's files: a folder with config.json, model.safetensors (or its
/// shards and their index) and tokenizer.json, as it is downloaded from the Hub.
#[derive(Debug, Parser)]
#[command(version)]
enum Cli {
    Fresh(fresh::Cli),
    Check(check::Cli),
    Write(write::Cli),
    FineTune(Box<fine_tune::Cli>),
    Serve(serve::Cli),
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let ended = match Cli::parse() {
        Cli::Fresh(cli) => fresh::run(&cli).map(done),
        Cli::Check(cli) => check::run(&cli),
        Cli::Write(cli) => write::run(&cli).map(done),
        Cli::FineTune(cli) => fine_tune::run(&cli).map(done),
        Cli::Serve(cli) => serve::run(&cli).map(done),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("doge: {error}");
        ExitCode::from(2)
    })
}

/// Where to compute.
#[derive(Debug, Args)]
struct Place {
    /// Device.
    #[arg(long, value_parser = ["flex", "cuda", "cpu", "wgpu"], default_value = "flex")]
    device: String,
    /// Element type of parameters and activations [default: f32, on cuda bf16].
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    dtype: Option<String>,
}

impl Place {
    /// Device and element type, if this program was built with the device and it supports the type.
    fn open(&self) -> Result<(Device, FloatDType), Error> {
        let device = match self.device.as_str() {
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
        let dtype = match (self.dtype.as_deref(), self.device.as_str()) {
            (Some("bf16"), _) | (None, "cuda") => FloatDType::BF16,
            (Some("f16"), _) => FloatDType::F16,
            _ => FloatDType::F32,
        };
        match device.supports_dtype(dtype) {
            true => Ok((device, dtype)),
            false => Err(format!("--device {} does not support {dtype:?}", self.device).into()),
        }
    }
}

/// How tokens are drawn.
#[derive(Debug, Args)]
struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Draw from this many of the most likely tokens [default: all].
    #[arg(long, value_name = "COUNT")]
    top_k: Option<usize>,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum [default: all].
    #[arg(long, value_name = "SUM")]
    top_p: Option<f64>,
    /// Draw from the tokens of at least this fraction of the greatest probability [default: all].
    #[arg(long, value_name = "PART")]
    min_p: Option<f64>,
    /// Penalty for tokens that have occurred; above 1 they become less likely.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Sampling {
    fn sampler(&self) -> Result<Sampler, Error> {
        let mut sampler = Sampler::random(self.seed)
            .with_temperature(self.temperature)
            .with_repetition_penalty(self.repetition_penalty);
        if let Some(count) = self.top_k {
            sampler = sampler.with_top_k(count);
        }
        if let Some(sum) = self.top_p {
            sampler = sampler.with_top_p(sum);
        }
        if let Some(part) = self.min_p {
            sampler = sampler.with_min_p(part);
        }
        sampler.try_check()?;
        Ok(sampler)
    }
}

/// Where proposals for the model to verify come from.
#[derive(Debug, Args)]
struct Drafting {
    /// Folder of a smaller model of the same vocabulary, which proposes tokens.
    #[arg(long, value_name = "DIR")]
    draft: Option<PathBuf>,
    /// Propose the tokens after an earlier occurrence of the last tokens, for example in the prompt.
    #[arg(long, conflicts_with = "draft")]
    lookup: bool,
    /// Number of tokens to propose at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    ahead: usize,
}

impl Drafting {
    fn open(&self, dtype: FloatDType, device: &Device) -> Result<Drafter, Error> {
        let read = |dir: &PathBuf| Doge::from_safetensors_as(dir, dtype, device);
        Ok(match (&self.draft, self.lookup) {
            (Some(dir), _) => Drafter::Model(Box::new(read(dir)?), self.ahead),
            (None, true) => Drafter::Lookup(self.ahead),
            (None, false) => Drafter::None,
        })
    }
}

/// Source of proposals, and how many tokens it proposes at a time.
enum Drafter {
    None,
    /// The text itself.
    Lookup(usize),
    /// A smaller model.
    Model(Box<Doge>, usize),
}

impl Drafter {
    // ANCHOR: draft
    /// Texts after each prompt, and the accuracy of the proposals, if any.
    fn generate(
        &self,
        generator: &Generator<'_, Doge>,
        prompts: &[Vec<u32>],
        on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(Vec<Generated>, Option<Speculation>), GenerateError> {
        let speculated = match self {
            Self::None => return Ok((generator.try_stream(prompts, on_event)?, None)),
            Self::Lookup(ahead) => {
                // Looks up the last three tokens, or fewer.
                let mut draft = PromptLookup::new(3, *ahead);
                generator.try_speculate(prompts, &mut draft, on_event)?
            }
            Self::Model(model, ahead) => {
                let mut draft = ModelDraft::new(&**model, *ahead);
                generator.try_speculate(prompts, &mut draft, on_event)?
            }
        };
        Ok((speculated.texts, Some(speculated.report)))
    }
    // ANCHOR_END: draft
}

/// A model with its vocabulary.
struct Folder {
    model: Doge,
    /// Frames documents as the folder's files say.
    vocabulary: Vocabulary,
    /// Tokens that end a text.
    stops: Vec<u32>,
}

impl Folder {
    // ANCHOR: read
    /// Reads a folder. Parameters and activations are `dtype`, whatever the type in the files; with autodiff if the
    /// device has it.
    fn read(dir: &Path, dtype: FloatDType, device: &Device) -> Result<Self, Error> {
        let model = Doge::from_safetensors_as(dir, dtype, device)?;
        let path = dir.join("tokenizer.json");
        let mut vocabulary = Vocabulary::from_file(&path)?.with_own_begin()?;
        let (tokens, rows) = (vocabulary.size(), model.config().vocab_size);
        if tokens > rows {
            let path = path.display();
            return Err(format!("{path}: {tokens} tokens, but the model has {rows}").into());
        }
        let stops = model.config().end_tokens();
        let stops: Vec<u32> = stops.iter().map(|&token| token as u32).collect();
        if let Some(&end) = stops.first() {
            vocabulary = vocabulary.with_end(end)?;
        }
        Ok(Self {
            model,
            vocabulary,
            stops,
        })
    }
    // ANCHOR_END: read

    /// Tokens of a text to continue: with the token that begins a document, without the one that ends it.
    fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let begin = self.vocabulary.begin().into_iter();
        Ok(begin.chain(self.vocabulary.encode(text)?).collect())
    }
}

/// Text of a token, plus the rest of the text after the last one.
fn piece(stream: &mut TextStream, token: u32, last: bool) -> Result<String, DataError> {
    let mut piece = stream.push(token)?;
    if last {
        piece.push_str(&stream.finish()?);
    }
    Ok(piece)
}

/// The error of an operation on a file or a folder.
fn at<E: error::Error>(path: &Path) -> impl Fn(E) -> Error {
    move |error| format!("{}: {error}", path.display()).into()
}

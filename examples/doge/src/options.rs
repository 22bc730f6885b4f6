//! Options that the programs share.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use clap::Args;
use flash_dma_models::doge::Doge;
use flash_dma_models::generate::{
    Event, GenerateError, Generated, Generator, ModelDraft, PromptLookup, Sampler, Speculation,
};
use train_text::device::{DeviceName, DtypeName};

use crate::error::Error;

/// The longest run of tokens that `--lookup` looks for.
const NGRAM: usize = 3;

/// Where to compute.
#[derive(Debug, Clone, Copy, Args)]
pub struct Place {
    /// Device.
    #[arg(long, value_enum, default_value = "flex")]
    pub device: DeviceName,
    /// Element type of parameters and activations [default: f32, on cuda bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeName>,
}

impl Place {
    /// The device, and the element type.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if this program was built without it, or it does not compute in the type.
    pub fn open(&self) -> Result<(Device, FloatDType), Error> {
        let dtype = self.dtype.unwrap_or(match self.device {
            DeviceName::Cuda => DtypeName::Bf16,
            _ => DtypeName::F32,
        });
        Ok((self.device.open(dtype)?, dtype.burn()))
    }
}

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, Args)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw from this many of the most likely tokens [default: all].
    #[arg(long, value_name = "COUNT")]
    pub top_k: Option<usize>,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum [default: all].
    #[arg(long, value_name = "SUM")]
    pub top_p: Option<f64>,
    /// Draw from the tokens of at least this part of the greatest probability [default: all].
    #[arg(long, value_name = "PART")]
    pub min_p: Option<f64>,
    /// Above 1, tokens that have occurred become less likely.
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl Sampling {
    /// The sampler, whose numbers a generator checks.
    pub fn sampler(&self) -> Sampler {
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
        sampler
    }
}

/// What proposes tokens for the model to verify.
#[derive(Debug, Clone, Args)]
pub struct Drafting {
    /// Folder of a smaller model of the same vocabulary, which proposes tokens.
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Propose what followed the last tokens where they stood before, in the prompt for example.
    #[arg(long, conflicts_with = "draft")]
    pub lookup: bool,
    /// Tokens that are proposed at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    pub ahead: usize,
}

impl Drafting {
    /// Reads the smaller model, if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if its folder cannot be read.
    pub fn open(&self, dtype: FloatDType, device: &Device) -> Result<Drafter, Error> {
        let read = |dir: &Path| Doge::from_safetensors_as(dir, dtype, device);
        Ok(match (&self.draft, self.lookup) {
            (Some(dir), _) => Drafter::Model(Box::new(read(dir)?), self.ahead),
            (None, true) => Drafter::Lookup(self.ahead),
            (None, false) => Drafter::None,
        })
    }
}

/// What proposes tokens, and how many at a time.
pub enum Drafter {
    /// Nothing: a token a step.
    None,
    /// The text itself.
    Lookup(usize),
    /// A smaller model.
    Model(Box<Doge>, usize),
}

impl Drafter {
    // ANCHOR: draft
    /// What follows each prompt, and how well the proposals were, if there were any.
    ///
    /// # Errors
    ///
    /// Those of [`Generator::try_stream`] and [`Generator::try_speculate`].
    pub fn generate(
        &self,
        generator: &Generator<'_, Doge>,
        prompts: &[Vec<u32>],
        on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(Vec<Generated>, Option<Speculation>), GenerateError> {
        let speculated = match self {
            Self::None => return Ok((generator.try_stream(prompts, on_event)?, None)),
            Self::Lookup(ahead) => {
                let mut draft = PromptLookup::new(NGRAM, *ahead);
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

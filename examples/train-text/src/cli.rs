//! The command line, and the settings that follow from it.

use std::path::PathBuf;

use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreForm};
use clap::Parser;
use flash_dma_models::nn::{Activations, DecoderConfig};
use serde::{Deserialize, Serialize};

use crate::device::{DeviceName, DtypeName};
use crate::error::Error;

/// Trains a byte-level transformer with dynamic-mask attention on text, and samples from it.
///
/// Without --data it trains on this repository's own sources and documentation. In a terminal it
/// shows Burn's dashboard, otherwise one line every few seconds. Into --out it writes checkpoints,
/// curves.json, curves.png and sample.txt.
///
/// The sizes left out depend on the device: a model of 0.6 million parameters for the processor,
/// one of 24 million with 2048 bytes of context in bf16 for --device cuda.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub struct Cli {
    /// Text to train on: a file, or every UTF-8 file under a directory.
    #[arg(long, value_name = "FILE|DIR")]
    pub data: Option<PathBuf>,
    /// Device to train on [default: flex].
    #[arg(long, value_enum)]
    pub device: Option<DeviceName>,
    /// Element type of the activations; parameters stay f32 [default: f32, on cuda bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeName>,
    /// Bytes of context.
    #[arg(long)]
    pub seq: Option<usize>,
    /// Keys a query may attend to [default: a quarter of --seq]; --seq or more is dense attention.
    #[arg(long)]
    pub window: Option<usize>,
    /// Training steps, rounded up to a multiple of --evaluations.
    #[arg(long)]
    pub steps: Option<usize>,
    /// Sequences a step.
    #[arg(long)]
    pub batch: Option<usize>,
    /// Transformer blocks.
    #[arg(long)]
    pub layers: Option<usize>,
    /// Width of the residual stream.
    #[arg(long)]
    pub d_model: Option<usize>,
    /// Query heads.
    #[arg(long)]
    pub heads: Option<usize>,
    /// Key and value heads.
    #[arg(long)]
    pub kv_heads: Option<usize>,
    /// Keep only the inputs of the blocks for the backward pass, and compute the rest a second time: less memory.
    #[arg(long)]
    pub checkpoint: bool,
    /// Peak learning rate, reached after a linear warm-up and left on a cosine.
    #[arg(long)]
    pub lr: Option<f64>,
    /// Seed of the parameters, of the data order and of sampling [default: 0].
    #[arg(long)]
    pub seed: Option<u64>,
    /// How often to validate and to write a checkpoint [default: 10].
    #[arg(long)]
    pub evaluations: Option<usize>,
    /// Where to write [default: runs/train-text, with --demo runs/train-text-demo].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// A run of three minutes at most on two cores.
    #[arg(long)]
    pub demo: bool,
    /// Train the same model with dense attention, too, and plot both.
    #[arg(long)]
    pub compare: bool,
    /// Continue the run in --out from its last checkpoint, with its settings.
    #[arg(long)]
    pub resume: bool,
    /// Bytes to sample at the end.
    #[arg(long, default_value_t = 400)]
    pub sample: usize,
    /// Sampling temperature; 0 takes the most likely byte.
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample from this many of the most likely bytes; 0 is all of them.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Sample from the fewest most likely bytes whose probabilities reach this sum.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Text the sample continues [default: the beginning of the validation text].
    #[arg(long)]
    pub prompt: Option<String>,
}

impl Cli {
    /// Where to write.
    pub fn out(&self) -> PathBuf {
        let default = if self.demo {
            "runs/train-text-demo"
        } else {
            "runs/train-text"
        };
        self.out.clone().unwrap_or_else(|| default.into())
    }
}

/// Everything that decides the outcome of a training, apart from the text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Device.
    pub device: DeviceName,
    /// Element type of the activations.
    pub dtype: DtypeName,
    /// Bytes of context.
    pub seq: usize,
    /// Keys a query may attend to.
    pub window: usize,
    /// Training steps asked for.
    pub steps: usize,
    /// Sequences a step.
    pub batch: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// What is kept of the blocks for the backward pass.
    #[serde(default)]
    pub activations: Activations,
    /// Peak learning rate.
    pub lr: f64,
    /// Seed.
    pub seed: u64,
    /// Epochs, as burn-train calls what lies between two validations.
    pub evaluations: usize,
}

impl Settings {
    /// The settings of a new run.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if they cannot be trained.
    pub fn new(cli: &Cli) -> Result<Self, Error> {
        Self::preset(cli.device.unwrap_or(DeviceName::Flex), cli.demo).with(cli)
    }

    /// These settings with what the command line says explicitly.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if they cannot be trained.
    pub fn with(self, cli: &Cli) -> Result<Self, Error> {
        let seq = cli.seq.unwrap_or(self.seq);
        // A window left out follows the sequence length.
        let window = if seq == self.seq {
            self.window
        } else {
            seq.div_ceil(4)
        };
        Self {
            device: cli.device.unwrap_or(self.device),
            dtype: cli.dtype.unwrap_or(self.dtype),
            seq,
            window: cli.window.unwrap_or(window),
            steps: cli.steps.unwrap_or(self.steps),
            batch: cli.batch.unwrap_or(self.batch),
            layers: cli.layers.unwrap_or(self.layers),
            d_model: cli.d_model.unwrap_or(self.d_model),
            heads: cli.heads.unwrap_or(self.heads),
            kv_heads: cli.kv_heads.unwrap_or(self.kv_heads),
            activations: match cli.checkpoint {
                true => Activations::Recomputed,
                false => self.activations,
            },
            lr: cli.lr.unwrap_or(self.lr),
            seed: cli.seed.unwrap_or(self.seed),
            evaluations: cli.evaluations.unwrap_or(self.evaluations),
        }
        .checked()
    }

    /// The same training with every key attended.
    pub fn dense(&self) -> Self {
        Self {
            window: self.seq,
            ..self.clone()
        }
    }

    /// Whether the window hides no key.
    pub fn is_dense(&self) -> bool {
        self.window >= self.seq
    }

    /// Steps between two validations.
    pub fn steps_an_epoch(&self) -> usize {
        self.steps.div_ceil(self.evaluations)
    }

    /// Steps trained in all.
    pub fn total_steps(&self) -> usize {
        self.steps_an_epoch() * self.evaluations
    }

    /// The model: every layer keeps keys by scores of the paper's form, which are added to the logits.
    pub fn model(&self) -> DecoderConfig {
        let attention = DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_max_seq_len(Some(self.seq))
            .with_keep_window(Some(self.window))
            .with_score_form(ScoreForm::Zoh)
            .with_score_role(Some(ScoreRole::RankAndBias));
        DecoderConfig::new(attention, self.layers)
            .with_dtype(self.dtype.burn())
            .with_activations(self.activations)
    }

    fn preset(device: DeviceName, demo: bool) -> Self {
        let processor = Self {
            device,
            dtype: DtypeName::F32,
            seq: 256,
            window: 64,
            steps: 2000,
            batch: 8,
            layers: 3,
            d_model: 128,
            heads: 4,
            kv_heads: 2,
            activations: Activations::Kept,
            lr: 3e-3,
            seed: 0,
            evaluations: 10,
        };
        match (device, demo) {
            (DeviceName::Cuda, false) => Self {
                dtype: DtypeName::Bf16,
                seq: 2048,
                window: 512,
                steps: 4000,
                batch: 16,
                layers: 8,
                d_model: 512,
                heads: 8,
                lr: 6e-4,
                ..processor
            },
            (_, false) => processor,
            (_, true) => Self {
                steps: 600,
                ..processor
            },
        }
    }

    fn checked(self) -> Result<Self, Error> {
        let positive = [
            ("seq", self.seq),
            ("window", self.window),
            ("steps", self.steps),
            ("batch", self.batch),
            ("layers", self.layers),
            ("d-model", self.d_model),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("evaluations", self.evaluations),
        ];
        let refuse = |message: String| Err(Error::Options(message));
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return refuse(format!("--{name} must be at least 1"));
        }
        let Self {
            d_model,
            heads,
            kv_heads,
            lr,
            steps,
            evaluations,
            ..
        } = self;
        if !d_model.is_multiple_of(8 * heads) {
            return refuse(format!(
                "--d-model {d_model} must give each of the {heads} heads a multiple of 8"
            ));
        }
        if !heads.is_multiple_of(kv_heads) {
            return refuse(format!(
                "--heads {heads} must be a multiple of --kv-heads {kv_heads}"
            ));
        }
        if !(lr > 0.0 && lr <= 1.0) {
            return refuse(format!("--lr {lr} must be above 0 and at most 1"));
        }
        if steps < evaluations {
            return refuse(format!(
                "--steps {steps} must be at least --evaluations {evaluations}"
            ));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(arguments: &[&str]) -> Cli {
        Cli::parse_from([&["train-text"], arguments].concat())
    }

    fn refusal(arguments: &[&str]) -> String {
        Settings::new(&cli(arguments)).unwrap_err().to_string()
    }

    #[test]
    fn the_window_follows_the_sequence_unless_it_is_given() {
        assert_eq!(Settings::new(&cli(&[])).unwrap().window, 64);
        assert_eq!(Settings::new(&cli(&["--seq", "100"])).unwrap().window, 25);
        assert_eq!(Settings::new(&cli(&["--window", "7"])).unwrap().window, 7);
        let dense = Settings::new(&cli(&["--seq", "100", "--window", "100"])).unwrap();
        assert!(dense.is_dense());
    }

    #[test]
    fn the_gpu_gets_the_larger_setting_and_flags_override_it() {
        let gpu = Settings::new(&cli(&["--device", "cuda"])).unwrap();
        assert_eq!(
            (gpu.seq, gpu.window, gpu.d_model, gpu.dtype),
            (2048, 512, 512, DtypeName::Bf16)
        );
        let small = Settings::new(&cli(&[
            "--device", "cuda", "--dtype", "f32", "--seq", "512",
        ]));
        let small = small.unwrap();
        assert_eq!(
            (small.seq, small.window, small.dtype),
            (512, 128, DtypeName::F32)
        );
    }

    #[test]
    fn plans_written_before_there_was_a_choice_keep_the_activations() {
        let settings = Settings::new(&cli(&["--checkpoint"])).unwrap();
        assert_eq!(settings.activations, Activations::Recomputed);
        let mut plan = serde_json::to_value(&settings).unwrap();
        plan.as_object_mut().unwrap().remove("activations");
        let old: Settings = serde_json::from_value(plan).unwrap();
        assert_eq!(old.activations, Activations::Kept);
    }

    #[test]
    fn steps_are_whole_epochs() {
        let settings = Settings::new(&cli(&["--steps", "25", "--evaluations", "10"])).unwrap();
        assert_eq!((settings.steps_an_epoch(), settings.total_steps()), (3, 30));
    }

    #[test]
    fn what_cannot_be_trained_is_refused_in_one_line() {
        assert_eq!(refusal(&["--window", "0"]), "--window must be at least 1");
        assert_eq!(
            refusal(&["--lr", "0"]),
            "--lr 0 must be above 0 and at most 1"
        );
        assert_eq!(
            refusal(&["--lr", "NaN"]),
            "--lr NaN must be above 0 and at most 1"
        );
        assert_eq!(
            refusal(&["--heads", "6", "--d-model", "96", "--kv-heads", "4"]),
            "--heads 6 must be a multiple of --kv-heads 4"
        );
        assert_eq!(
            refusal(&["--d-model", "100"]),
            "--d-model 100 must give each of the 4 heads a multiple of 8"
        );
        assert_eq!(
            refusal(&["--steps", "4"]),
            "--steps 4 must be at least --evaluations 10"
        );
    }
}

//! Settings of a training, and its report.

use crate::Curriculum;
use crate::nn::DecoderConfig;
use burn::config::Config;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Training of a byte-level [`Decoder`](crate::nn::Decoder) on text: AdamW, a learning rate that rises for a twentieth
/// of the steps and falls on a cosine to a tenth, optionally short texts first, and checkpoints. The loop is Burn's.
///
/// ```no_run
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
/// use flash_dma_models::nn::DecoderConfig;
/// use flash_dma_models::TextTraining;
///
/// let attention = DynamicMaskAttentionConfig::new(128, 4)
///     .with_selection(Selection::keep(64))
///     .with_rope(Some(Rope::new(256)));
/// let training = TextTraining::new(DecoderConfig::new(attention, 4), 256);
/// let text = std::fs::read("book.txt").unwrap();
/// let model = training.try_run(&text, "runs/first", &[Device::flex()], |at| println!("{at:?}"));
/// # }
/// ```
#[derive(Config, Debug)]
pub struct TextTraining {
    /// Configuration of the model.
    pub model: DecoderConfig,
    /// Bytes of a text.
    pub tokens: usize,
    /// Texts of a step, on all devices together; proportionally more of shorter ones.
    #[config(default = 8)]
    pub batch: usize,
    /// How the devices read the texts of a step. Default: each its share of them, as wholes.
    #[config(default = "Reading::default()")]
    pub reading: Reading,
    /// Training steps.
    #[config(default = 600)]
    pub steps: usize,
    /// Highest learning rate.
    #[config(default = 3e-3)]
    pub rate: f64,
    /// Share of the steps with shorter texts, in which layers that select their keys keep the same fraction of them.
    /// Default: none.
    #[config(default = "Curriculum::default()")]
    pub curriculum: Curriculum,
    /// Seed of the parameters and of the order of the texts.
    #[config(default = 0)]
    pub seed: u64,
    /// Number of validations, each followed by a checkpoint.
    #[config(default = 10)]
    pub evaluations: usize,
}

/// How the devices read the texts of a step. The gradients are the same, up to rounding. In parts and over devices, blocks keep their
/// activations, whatever the model's configuration says: the parts are what bounds memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// Each reads its share of the texts.
    #[default]
    Whole,
    /// Each reads its share of the texts [in parts](crate::nn::Decoder::try_loss_and_gradients_in_parts) of so many bytes: for texts
    /// that do not fit into memory at once.
    InParts(usize),
    /// Each reads a part of [every text](crate::nn::Decoder::try_loss_and_gradients_over).
    OverDevices,
}

/// Losses at an evaluation, in nats per byte.
#[derive(Clone, Copy, Debug)]
pub struct Evaluated {
    /// Steps done.
    pub step: usize,
    /// Mean over the steps since the last evaluation.
    pub training_loss: f32,
    /// Mean over at most 64 texts that are not trained on.
    pub validation_loss: f64,
    /// Time since this call began.
    pub time: Duration,
}

impl TextTraining {
    /// Number of steps before an evaluation, counted from 1; 0 for 0.
    pub(super) fn end(&self, evaluation: usize) -> usize {
        (evaluation * self.steps).div_ceil(self.evaluations)
    }

    /// How many times shorter than at the end the texts of a step are, counted from 0.
    pub(super) fn divisor(&self, step: usize) -> usize {
        self.curriculum.divisor(self.tokens, step, self.steps)
    }

    /// Learning rate of a step, counted from 0.
    pub(super) fn rate_at(&self, step: usize) -> f64 {
        let warm_up = self.steps.div_ceil(20);
        if step < warm_up {
            return self.rate * (step + 1) as f64 / warm_up as f64;
        }
        let done = (step - warm_up) as f64 / (self.steps - warm_up) as f64;
        self.rate * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
    }
}

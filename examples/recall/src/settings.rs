//! What decides the outcome of a run.

use crate::arm::Arm;
use crate::lengthening::divisor;
use crate::task::{Layout, Task};
use burn_flash_dma::nn::RoundRobin;
use burn_flash_dma::{LeaveOneOut, RankSoftmax};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::ops::Not;
use train_text::device::{DeviceName, DtypeName};
use train_text::narrowing::Narrowing;
use train_text::stages::Share;

/// Everything that decides the outcome of a run: a row with equal settings need not be made again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Device.
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32.
    pub dtype: DtypeName,
    /// What chooses the keys.
    pub arm: Arm,
    /// Where the pairs stand.
    pub layout: Layout,
    /// Tokens per text.
    pub tokens: usize,
    /// Keys per query and kv head; all tokens for an arm that prunes nothing.
    pub window: usize,
    /// In which steps the window is wider.
    #[serde(default, skip_serializing_if = "Narrowing::is_none")]
    pub narrowing: Narrowing,
    /// In which share of the steps texts are shorter, with a window that is shorter as much, and more of them.
    #[serde(default, skip_serializing_if = "Share::is_none")]
    pub lengthening: Share,
    /// Whether every other step has a window of at least half of the text, of an arm that prunes.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub every_other_wide: bool,
    /// Whether the softmax has a learned logit without a key, in every layer.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub sink: bool,
    /// The keys ranked next whose scores learn, of an arm that has some; `None` is the arm's own number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runners_up: Option<usize>,
    /// How the tokens are dealt to the heads of the first layer, of an arm whose scores only rank, see
    /// [`turns::of_layer`](train_text::turns::of_layer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_robin: Option<RoundRobin>,
    /// Factor on the gradient that tokens get through their scores, of an arm that has runners-up; `None` is 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_gradient_scale: Option<f64>,
    /// What the scores of kept keys learn, of an arm whose scores only rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leave_one_out: Option<LeaveOneOut>,
    /// What the scores of a head compete for, of an arm whose scores only rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_softmax: Option<RankSoftmax>,
    /// The model's sizes.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// The most training steps. The learning rate falls to 0 over them.
    pub steps: usize,
    /// Texts per step.
    pub batch: usize,
    /// Peak learning rate.
    pub rate: f64,
    /// Seed of the parameters and of the texts.
    pub seed: u64,
}

/// What a training step trains with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The texts.
    pub task: Task,
    /// Keys per query and kv head.
    pub window: usize,
    /// Texts.
    pub batch: usize,
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Features per token.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key/value heads of a layer.
    pub kv_heads: usize,
}

/// A size of everything that goes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// CI's: seconds per row in an optimised build, a minute in a debug build.
    Smallest,
    /// For a processor: minutes per row.
    Small,
    /// For the table, on a GPU.
    Table,
}

impl Settings {
    /// What the program trains an arm with if it is told the size alone.
    pub fn of(arm: Arm, size: Size) -> Self {
        Self {
            device: DeviceName::Flex,
            dtype: DtypeName::F32,
            arm,
            layout: Layout::Scattered,
            tokens: size.tokens(),
            window: Self::window(arm, size.tokens(), 8),
            narrowing: Narrowing::default(),
            lengthening: Share::default(),
            every_other_wide: false,
            sink: false,
            runners_up: None,
            round_robin: None,
            token_gradient_scale: None,
            leave_one_out: None,
            rank_softmax: None,
            sizes: size.sizes(),
            steps: size.steps(),
            batch: size.batch(),
            rate: 1e-3,
            seed: 0,
        }
    }

    /// The task.
    pub fn task(&self) -> Task {
        Task::new(self.tokens, self.layout)
    }

    /// The window that narrows, at a training step counted from 0: what the model is evaluated with.
    pub fn window_at(&self, step: usize) -> usize {
        (self.narrowing).window(self.window, self.tokens, step, self.steps)
    }

    /// What a training step, counted from 0, trains with.
    pub fn step(&self, step: usize) -> Step {
        let divisor = divisor(self.lengthening, self.tokens, step, self.steps);
        let task = self.task().shortened(divisor);
        let window = match self.every_other_wide && step % 2 == 1 {
            true => self.window_at(step).max(self.tokens / 2),
            false => self.window_at(step),
        };
        // The recent keys of a layer stay as many.
        let least = 2 * self.arm.recent(self.window);
        Step {
            task,
            window: (window / divisor).max(least).min(window),
            batch: self.batch * divisor,
        }
    }

    /// Whether a step, counted from 0, trains with shorter texts or a wider window than the last one.
    pub fn is_easier(&self, step: usize) -> bool {
        self.window_at(step) != self.window || self.step(step).task != self.task()
    }

    /// The window of an arm that may keep one key in `share`.
    pub fn window(arm: Arm, tokens: usize, share: usize) -> usize {
        match arm.is_pruned() {
            true => tokens / share,
            false => tokens,
        }
    }

    /// The facts that all heads of a layer can keep between them, as a share of all facts, at most 1. An attention
    /// layer that answers by looking at facts cannot do better; but several layers keep keys of their own, and a key
    /// that is kept may have gathered what it saw in an earlier layer.
    pub fn cap(&self) -> f64 {
        let places = self.sizes.kv_heads * self.window;
        (places as f64 / self.task().pairs as f64).min(1.0)
    }

    /// As [`cap`](Self::cap), of all layers.
    pub fn cap_of_all_layers(&self) -> f64 {
        let places = self.sizes.layers * self.sizes.kv_heads * self.window;
        (places as f64 / self.task().pairs as f64).min(1.0)
    }

    /// Keys that a kv head may keep, per pair.
    pub fn window_per_pair(&self) -> f64 {
        self.window as f64 / self.task().pairs as f64
    }
}

impl Size {
    /// Tokens per text.
    pub fn tokens(self) -> usize {
        match self {
            Self::Smallest => 64,
            Self::Small => 128,
            Self::Table => 256,
        }
    }

    /// The model.
    pub fn sizes(self) -> Sizes {
        let layers = match self {
            Self::Smallest => 1,
            Self::Small | Self::Table => 2,
        };
        Sizes {
            // Scores are linear in so many features: with 32 or 64 they kept far fewer facts.
            width: 128,
            layers,
            heads: 4,
            kv_heads: 2,
        }
    }

    /// The most steps.
    pub fn steps(self) -> usize {
        match self {
            Self::Smallest => 300,
            Self::Small => 1000,
            Self::Table => 4000,
        }
    }

    /// Texts per step.
    pub fn batch(self) -> usize {
        match self {
            Self::Smallest | Self::Small => 16,
            Self::Table => 32,
        }
    }
}

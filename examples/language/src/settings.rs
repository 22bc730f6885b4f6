//! What decides the outcome of a run.

use crate::arm::Arm;
use burn_flash_dma::nn::RoundRobin;
use burn_flash_dma::{LeaveOneOut, RankSoftmax};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::ops::Not;
use train_text::device::{DeviceName, DtypeName};
use train_text::factor;
use train_text::model::{Positions, TextModelConfig};
use train_text::narrowing::Narrowing;

/// The fewest keys of a window.
const LEAST_WINDOW: usize = 4;

/// What a model is trained on and asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Running text: the loss, by the position in the context.
    Text,
    /// Running text with facts in it: answers to questions about them.
    Needles,
}

/// Everything that decides the outcome of a run: a row with equal settings need not be made again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The task.
    pub task: Task,
    /// Device.
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32.
    pub dtype: DtypeName,
    /// What chooses the keys.
    pub arm: Arm,
    /// How the layers know where a key is.
    pub positions: Positions,
    /// Bytes of a training text.
    pub tokens: usize,
    /// Keys per query and kv head, at every length; `None` is all of them.
    pub window: Option<usize>,
    /// The last keys that [`Arm::Ours`] keeps whatever their scores, counted in its window; `None` is a quarter of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recent: Option<usize>,
    /// How much higher a token ranks than one before it with [`Arm::Ours`]; `None` is no difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recency_slope: Option<f64>,
    /// How the tokens are dealt to the heads of the first layer with [`Arm::Ours`], see [`turns::of_layer`](train_text::turns::of_layer); `None` if they
    /// are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_robin: Option<RoundRobin>,
    /// Numbers of layers, counted from 1, that attend to all keys in an arm that prunes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dense_layers: Vec<usize>,
    /// Factor on the gradient that tokens get through their scores with [`Arm::Ours`]; `None` is 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_gradient_scale: Option<f64>,
    /// What the scores of kept keys learn with [`Arm::Ours`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leave_one_out: Option<LeaveOneOut>,
    /// What the scores of a head compete for with [`Arm::Ours`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_softmax: Option<RankSoftmax>,
    /// The keys ranked next whose scores learn with [`Arm::Ours`]; `None` is the layer's own number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runners_up: Option<usize>,
    /// In which steps the window is wider.
    #[serde(default, skip_serializing_if = "Narrowing::is_none")]
    pub narrowing: Narrowing,
    /// Whether the softmax of every layer has a learned logit per head that has no key.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub sink: bool,
    /// The model's sizes.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// Training steps. The learning rate falls to 0 over them.
    pub steps: usize,
    /// Texts per step.
    pub batch: usize,
    /// Peak learning rate.
    pub rate: f64,
    /// Seed of the parameters and of the texts.
    pub seed: u64,
    /// The corpus, by its fingerprint.
    pub corpus: String,
    /// Of text: the most validation windows. Of needles: texts per length, kind and depth.
    pub texts: usize,
    /// Of text: windows besides that of the training to evaluate [`Arm::Ours`] with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_windows: Vec<usize>,
    /// The weight of the loss of an answer's byte, where that of any other byte is 1.
    pub answer_weight: f64,
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Width of the residual stream.
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
    /// For a processor, in an optimised build: of text a minute per row at most, of needles a quarter of an hour.
    Smallest,
    /// For the table, on a GPU.
    Table,
}

impl Size {
    /// Keys of a query in a local layer, where there are any.
    pub fn local_window(self) -> usize {
        match self {
            Self::Smallest => 32,
            Self::Table => 256,
        }
    }
}

impl Task {
    /// The longest texts to evaluate with, in training lengths.
    pub fn longest(self) -> usize {
        match self {
            Self::Text => 4,
            Self::Needles => 8,
        }
    }

    /// What the program trains an arm with if it is told the task and the size alone.
    pub fn settings(self, size: Size) -> Settings {
        let sizes = |width, layers, heads| Sizes {
            width,
            layers,
            heads,
            kv_heads: 2,
        };
        let (tokens, sizes, batch, texts) = match (self, size) {
            (Self::Text, Size::Smallest) => (128, sizes(64, 2, 4), 8, 16),
            (Self::Text, Size::Table) => (8192, sizes(512, 8, 8), 4, 256),
            (Self::Needles, Size::Smallest) => (256, sizes(128, 4, 4), 16, 16),
            (Self::Needles, Size::Table) => (2048, sizes(256, 4, 4), 16, 32),
        };
        let (steps, rate) = match (self, size) {
            (Self::Text, Size::Smallest) => (150, 3e-3),
            (Self::Needles, Size::Smallest) => (2000, 2e-3),
            (Self::Text, Size::Table) => (4000, 6e-4),
            (Self::Needles, Size::Table) => (3000, 1e-3),
        };
        Settings {
            task: self,
            device: DeviceName::Flex,
            dtype: DtypeName::F32,
            arm: Arm::Dense,
            positions: match self {
                Self::Text => Positions::Rope,
                Self::Needles => Positions::RopeInLocalLayers {
                    window: size.local_window(),
                },
            },
            tokens,
            window: None,
            recent: None,
            recency_slope: None,
            round_robin: None,
            dense_layers: Vec::new(),
            token_gradient_scale: None,
            leave_one_out: None,
            rank_softmax: None,
            runners_up: None,
            narrowing: Narrowing::default(),
            sink: false,
            sizes,
            steps,
            batch,
            rate,
            seed: 0,
            corpus: String::new(),
            texts,
            other_windows: Vec::new(),
            answer_weight: match self {
                Self::Text => 1.0,
                Self::Needles => 10.0,
            },
        }
    }
}

impl Settings {
    /// The longest text to evaluate with.
    pub fn longest(&self) -> usize {
        self.task.longest() * self.tokens
    }

    /// The window of a training step, counted from 0.
    pub fn window_at(&self, step: usize) -> Option<usize> {
        let narrowed = |window| (self.narrowing).window(window, self.tokens, step, self.steps);
        self.window.map(narrowed)
    }

    /// The model.
    pub fn model(&self) -> TextModelConfig {
        let Sizes {
            width,
            layers,
            heads,
            kv_heads,
        } = self.sizes;
        let longest = self.longest();
        // A window that hides no key is none.
        let window = self.window.unwrap_or(longest);
        TextModelConfig::new(width, layers, heads, kv_heads, longest, window)
            .with_dtype(self.dtype.burn())
            .with_keys(self.arm.keys())
            .with_recent(self.recent)
            .with_recency_slope(self.recency_slope)
            .with_round_robin(self.round_robin)
            .with_dense_layers(self.dense_layers.clone())
            .with_token_gradient_scale(self.token_gradient_scale)
            .with_leave_one_out(self.leave_one_out)
            .with_rank_softmax(self.rank_softmax)
            .with_runners_up(self.runners_up)
            .with_learnable_sink(Some(self.sink))
            .with_positions(self.positions)
    }

    /// Refuses what cannot be trained, in one line.
    ///
    /// # Errors
    ///
    /// That line, which names the option.
    pub fn check(&self) -> Result<(), String> {
        let Sizes {
            width,
            layers,
            heads,
            kv_heads,
        } = self.sizes;
        let least = match self.task {
            Task::Text => 64,
            Task::Needles => 256,
        };
        if self.tokens < least {
            return Err(format!("--tokens {}: at least {least}", self.tokens));
        }
        if let Some(window) = self.window.filter(|&window| window < LEAST_WINDOW) {
            return Err(format!(
                "--share of {} tokens is a window of {window}: at least {LEAST_WINDOW} are needed",
                self.tokens
            ));
        }
        if let (Some(recent), Some(window)) = (self.recent, self.window)
            && recent > window
        {
            return Err(format!("--recent {recent}: the window has {window}"));
        }
        let least = self.recent.unwrap_or_default().max(LEAST_WINDOW);
        if let Some(window) = self.other_windows.iter().find(|&&window| window < least) {
            return Err(format!(
                "--other-windows {window}: at least {least} are needed"
            ));
        }
        factor::check("--recency-slope", self.recency_slope)?;
        factor::check("--token-gradient-scale", self.token_gradient_scale)?;
        if self.positions == (Positions::RopeInLocalLayers { window: 0 }) {
            return Err("--local-window must be at least 1".into());
        }
        if [self.steps, self.batch, self.texts, layers, heads, kv_heads].contains(&0) {
            let options = "--steps, --batch, --texts, --layers, --heads and --kv-heads";
            return Err(format!("{options} must be at least 1"));
        }
        if let Some(number) = (self.dense_layers.iter()).find(|n| !(1..=layers).contains(n)) {
            return Err(format!(
                "--dense-layers {number}: the {layers} layers count from 1"
            ));
        }
        if !width.is_multiple_of(8 * heads) || width == 0 {
            return Err(format!(
                "--width {width} must give each of the {heads} heads a multiple of 8"
            ));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "--heads {heads} must be a multiple of --kv-heads {kv_heads}"
            ));
        }
        for (option, value) in [("rate", self.rate), ("answer-weight", self.answer_weight)] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(format!("--{option} {value} must be above 0"));
            }
        }
        Ok(())
    }

    /// Whether a run differs from another one in the arm alone.
    pub fn differs_in_arm(&self, other: &Self) -> bool {
        let same = Self {
            arm: other.arm,
            window: other.window,
            recent: other.recent,
            recency_slope: other.recency_slope,
            round_robin: other.round_robin,
            dense_layers: other.dense_layers.clone(),
            token_gradient_scale: other.token_gradient_scale,
            leave_one_out: other.leave_one_out,
            rank_softmax: other.rank_softmax,
            runners_up: other.runners_up,
            narrowing: other.narrowing,
            other_windows: other.other_windows.clone(),
            ..self.clone()
        };
        self.arm != other.arm && same == *other
    }

    /// One line.
    pub fn title(&self) -> String {
        let window = self
            .window
            .map_or("all keys".into(), |w| format!("{w} keys"));
        format!(
            "{}, {} tokens, {window}, seed {}",
            self.arm.name(),
            self.tokens,
            self.seed
        )
    }
}

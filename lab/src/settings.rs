//! Settings that determine the outcome of a run.

use crate::Result;
use crate::arm::{Arm, Scores};
use crate::device::{DeviceName, DtypeName, name};
use crate::recall::task::{Layout, Pairs};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Logits, Rope, ScoreLearning, Selection};
use clap::{Args, ValueEnum};
use flash_dma_models::Curriculum;
use flash_dma_models::nn::{DecoderConfig, last_keys};
use serde::{Deserialize, Serialize};

/// Minimum window.
const LEAST_WINDOW: usize = 4;

/// Maximum number of validation windows: each is a number in the row.
const MOST_WINDOWS: usize = 256;

/// Training task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Pairs of a key and a value among fillers: answers to questions that name a key.
    Recall,
    /// Running text: the loss, by the position in the context.
    Text,
    /// Running text with facts in it: answers to questions about them.
    Needles,
}

/// Everything that determines the outcome of a run: a row with equal settings need not be made again. Options that an
/// arm does not use are `None`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The task.
    pub task: Task,
    /// Device.
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32.
    pub dtype: DtypeName,
    /// Method of selecting keys.
    pub arm: Arm,
    /// Tokens, or bytes, of a training text.
    pub tokens: usize,
    /// Keys per query and kv head, at every length; `None` is all of them.
    pub window: Option<usize>,
    /// How the layers select their keys.
    #[serde(flatten)]
    pub choice: Choice,
    /// Window of the odd layers, which are local and alone have the rotary encoding; `None` for no local layers.
    pub local_window: Option<usize>,
    /// The model's sizes.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// Maximum number of training steps. The learning rate falls to 0 over them.
    pub steps: usize,
    /// Texts per step.
    pub batch: usize,
    /// Peak learning rate.
    pub rate: f64,
    /// Seed of the parameters and of the texts.
    pub seed: u64,
    /// Text and needles only: fingerprint of the corpus.
    pub corpus: String,
    /// For text: maximum number of validation windows. For needles: texts per length, kind and depth.
    pub texts: usize,
    /// Needles only: weight of an answer's byte in the loss, where any other byte has 1.
    pub answer_weight: f64,
}

/// How the layers select their keys, and what eases that in training: options of the program and fields of a row,
/// which leaves out those an arm does not use.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
pub struct Choice {
    /// How many of the most recent keys are always kept, in arms that keep some; they count toward the window
    /// [default: a quarter of it].
    #[arg(long)]
    pub recent: Option<usize>,
    /// Turns off recency in the ranking, in arms whose scores only rank: position does not matter in any head.
    #[arg(long)]
    pub without_recency: bool,
    /// Deals runs of this many tokens to the key/value heads in turn, twice as many in each further layer; a head
    /// ranks all other tokens below its own. In arms whose scores only rank.
    #[arg(long, value_name = "RUN")]
    pub turns: Option<usize>,
    /// Lets tokens learn through scores that only rank, in arms whose scores learn by rank alone.
    #[arg(long)]
    pub with_tokens: bool,
    /// Kept keys do not learn from their ranks, in arms whose scores learn by rank alone.
    #[arg(long)]
    pub without_kept: bool,
    /// Does not centre the rank gradients of a head, in arms whose scores learn by rank alone.
    #[arg(long)]
    pub without_compete: bool,
    /// Number of runners-up, in arms that have some [default: a quarter of the window, at least 8].
    #[arg(long)]
    pub runners_up: Option<usize>,
    /// Share of the steps in which arms that prune have a wider window: half of the text, then half of that, and so
    /// on.
    #[arg(long, default_value = "0")]
    pub narrowing: Curriculum,
    /// Share of the steps with shorter texts but as many tokens: 64 at first, then twice as many, and so on; arms
    /// that prune keep the same share of the keys. Not for needles.
    #[arg(long, default_value = "0")]
    pub lengthening: Curriculum,
    /// Adds a learned sink logit per head to every layer: a query that no key answers can attend to nothing.
    #[arg(long)]
    pub sink: bool,
    /// Text and needles only: layers, counted from 1, that attend to all keys in arms that prune.
    #[arg(long, value_delimiter = ',')]
    pub dense_layers: Vec<usize>,
    /// Text only: also evaluates arms whose scores learn by rank with these windows, at the training length.
    #[arg(long, value_name = "KEYS", value_delimiter = ',')]
    pub other_windows: Vec<usize>,
    /// Recall only: positions of the pairs.
    #[arg(long, value_enum, default_value = "scattered")]
    pub layout: Layout,
}

/// Settings of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Divisor of its texts' length.
    pub divisor: usize,
    /// Keys per query and kv head.
    pub window: Option<usize>,
    /// Texts.
    pub batch: usize,
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

/// A preset of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// For CI: for recall seconds per row in an optimised build, a minute in a debug build.
    Smallest,
    /// For a processor: minutes per row, for needles a quarter of an hour.
    Small,
    /// For the table, on a GPU.
    Table,
}

impl Task {
    /// Longest texts for evaluation, in training lengths.
    pub fn longest(self) -> usize {
        match self {
            Self::Recall => 1,
            Self::Text => 4,
            Self::Needles => 8,
        }
    }

    /// Settings for [`Arm::Dense`] if only the task and the size are given.
    pub fn settings(self, size: Size) -> Settings {
        // Scores of recall are linear in this many features: with 32 or 64 they kept far fewer facts.
        let (tokens, [width, layers, heads]) = match (self, size) {
            (Self::Recall, Size::Smallest) => (64, [128, 1, 4]),
            (Self::Recall, Size::Small) => (128, [128, 2, 4]),
            (Self::Recall, Size::Table) => (256, [128, 2, 4]),
            (Self::Text, Size::Table) => (8192, [512, 8, 8]),
            (Self::Text, _) => (128, [64, 2, 4]),
            (Self::Needles, Size::Table) => (2048, [256, 4, 4]),
            (Self::Needles, _) => (256, [128, 4, 4]),
        };
        let (steps, batch, rate, texts) = match (self, size) {
            (Self::Recall, Size::Smallest) => (300, 16, 1e-3, 1),
            (Self::Recall, Size::Small) => (1000, 16, 1e-3, 1),
            (Self::Recall, Size::Table) => (4000, 32, 1e-3, 1),
            (Self::Text, Size::Table) => (4000, 4, 6e-4, 256),
            (Self::Text, _) => (150, 8, 3e-3, 16),
            (Self::Needles, Size::Table) => (3000, 16, 1e-3, 32),
            (Self::Needles, _) => (2000, 16, 2e-3, 16),
        };
        Settings {
            task: self,
            device: DeviceName::Flex,
            dtype: DtypeName::F32,
            arm: Arm::Dense,
            tokens,
            window: None,
            choice: Choice::default(),
            local_window: match (self, size) {
                (Self::Needles, Size::Table) => Some(256),
                (Self::Needles, _) => Some(32),
                _ => None,
            },
            sizes: Sizes {
                width,
                layers,
                heads,
                kv_heads: 2,
            },
            steps,
            batch,
            rate,
            seed: 0,
            corpus: String::new(),
            texts,
            answer_weight: match self {
                Self::Needles => 10.0,
                _ => 1.0,
            },
        }
    }
}

impl Settings {
    /// Settings of an arm of a task that keeps one key in eight if it prunes; otherwise the defaults.
    pub fn of(task: Task, arm: Arm, size: Size) -> Self {
        let settings = task.settings(size);
        Self {
            arm,
            window: arm.is_pruned().then_some(settings.tokens / 8),
            ..settings
        }
    }

    /// The task of recall.
    pub fn recall(&self) -> Pairs {
        Pairs::new(self.tokens, self.choice.layout)
    }

    /// The (narrowing) window at a training step, counted from 0, with which the model is evaluated.
    pub fn window_at(&self, step: usize) -> Option<usize> {
        let (narrowing, tokens, steps) = (self.choice.narrowing, self.tokens, self.steps);
        let narrowed = |window| narrowing.window(window, tokens, step, steps);
        self.window.map(narrowed)
    }

    /// Settings of a training step, counted from 0.
    pub fn step(&self, step: usize) -> Step {
        let choice = &self.choice;
        let divisor = (choice.lengthening).divisor(self.tokens, step, self.steps);
        let recent = self.recent().unwrap_or_default();
        let window = self.window_at(step);
        let window = window.map(|window| (window / divisor).max(2 * recent).min(window));
        Step {
            divisor,
            window,
            batch: self.batch * divisor,
        }
    }

    /// True if a step, counted from 0, has shorter texts or a wider window than the last one.
    pub fn is_easier(&self, step: usize) -> bool {
        self.window_at(step) != self.window || self.step(step).divisor > 1
    }

    /// How many of the most recent keys are always kept; `None` for the layer's default.
    fn recent(&self) -> Option<usize> {
        let of = |window| self.choice.recent.or(self.arm.recent(window));
        self.window.and_then(of)
    }

    /// Configuration of the blocks, and for text and needles of the whole model.
    pub fn decoder(&self) -> DecoderConfig {
        let (arm, window, choice) = (self.arm, self.window, &self.choice);
        let runners_up = arm.runners_up(window.unwrap_or(0));
        let learning = match arm.scores() {
            Scores::FrozenRank | Scores::None => ScoreLearning::none(),
            _ => ScoreLearning::of(arm.layer_scores()),
        };
        let learning = ScoreLearning {
            runners_up: choice.runners_up.or(runners_up),
            kept: learning.kept && !choice.without_kept,
            compete: learning.compete && !choice.without_compete,
            tokens: learning.tokens || choice.with_tokens,
        };
        let layer = DynamicMaskAttentionConfig::new(self.sizes.width, self.sizes.heads)
            .with_n_kv_heads(Some(self.sizes.kv_heads))
            .with_rope(Some(Rope::new(self.task.longest() * self.tokens)))
            .with_scores(arm.layer_scores())
            .with_selection(
                Selection::new()
                    .with_window(window)
                    .with_recent(self.recent())
                    .with_recency(!choice.without_recency)
                    .with_turns(choice.turns),
            )
            .with_learning(Some(learning))
            .with_logits(Logits::new().with_sink(choice.sink));
        let layer = match (arm, self.task) {
            (Arm::Sliding, Task::Text | Task::Needles) => last_keys(&layer, window),
            _ => layer,
        };
        DecoderConfig::new(layer, self.sizes.layers)
            .with_local_window(self.local_window)
            .with_dense_layers(choice.dense_layers.clone())
            .with_dtype(self.dtype.burn())
    }

    /// Refuses settings that cannot be trained with and that layers do not check, in a line that names the option.
    pub fn check(&self) -> Result<()> {
        let refuse = |line: String| Err(line.into());
        let (choice, tokens, recent, sizes) =
            (&self.choice, self.tokens, self.recent(), self.sizes);
        let of_recall = self.task == Task::Recall;
        let least = match self.task {
            Task::Recall => 16,
            Task::Text => 64,
            Task::Needles => 256,
        };
        if tokens < least {
            return refuse(format!("--tokens {tokens}: at least {least}"));
        }
        if !of_recall && !self.arm.is_of_a_layer() {
            return refuse(format!("--arms {} is of recall alone", name(self.arm)));
        }
        let layers_differ = self.local_window.is_some() || !choice.dense_layers.is_empty();
        if of_recall && layers_differ {
            return refuse("--local-window and --dense-layers are not of recall".into());
        }
        if self.task == Task::Needles && !choice.lengthening.is_none() {
            return refuse("--lengthening: a short text has no room for needles".into());
        }
        if let Some(window) = self.window {
            if window < LEAST_WINDOW {
                return refuse(format!(
                    "--shares of {tokens} tokens is a window of {window}: at least {LEAST_WINDOW} are needed"
                ));
            }
            if let Some(recent) = recent.filter(|&recent| recent > window) {
                return refuse(format!("--recent {recent}: the window has {window}"));
            }
        }
        let least = choice.recent.unwrap_or_default().max(LEAST_WINDOW);
        if let Some(window) = choice.other_windows.iter().find(|&&n| n < least) {
            let line = format!("--other-windows {window}: at least {least} are needed");
            return refuse(line);
        }
        if choice.turns == Some(0) {
            return refuse("--turns 0: at least 1 token in a row".into());
        }
        let of_model = [sizes.layers, sizes.heads, sizes.kv_heads];
        if of_model.contains(&0) || [self.steps, self.batch, self.texts].contains(&0) {
            let options = "--steps, --batch, --texts, --layers, --heads and --kv-heads";
            return refuse(format!("{options} must be at least 1"));
        }
        if self.task == Task::Text && self.texts > MOST_WINDOWS {
            return refuse(format!("--texts {}: at most {MOST_WINDOWS}", self.texts));
        }
        let layers = sizes.layers;
        let beyond = |number: &&usize| !(1..=layers).contains(*number);
        if let Some(number) = choice.dense_layers.iter().find(beyond) {
            let line = format!("--dense-layers {number}: the {layers} layers count from 1");
            return refuse(line);
        }
        for (option, value) in [("rates", self.rate), ("answer-weight", self.answer_weight)] {
            if !(value > 0.0 && value.is_finite()) {
                return refuse(format!("--{option} {value} must be above 0"));
            }
        }
        Ok(())
    }

    /// The settings in one line.
    pub fn title(&self) -> String {
        let all = || "all keys".into();
        let window = self.window.map_or_else(all, |w| format!("{w} keys"));
        let (arm, tokens) = (name(self.arm), self.tokens);
        let (rate, seed) = (self.rate, self.seed);
        format!("{arm}, {tokens} tokens, {window}, rate {rate}, seed {seed}")
    }
}

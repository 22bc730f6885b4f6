//! Trains a model and measures its kept facts and right answers.

use crate::model::{Model, Scores};
use crate::task::{FACTS, LENGTH, Random, Texts};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::train::AdamWConfig;
use burn_flash_dma::{Intervals, Selector};

/// Keys that a query keeps in each key/value head.
pub const WINDOW: usize = 16;
const RUNNERS_UP: usize = 4;
const BATCH: usize = 32;
/// Steps of the learning rate's warm-up.
pub const WARM_UP: usize = 100;
const LEARNING_RATE: f64 = 1e-3;

/// Learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Falls linearly to 0 at the end.
    Falling,
    /// Constant.
    Constant,
}

impl Rate {
    /// Learning rate of a step.
    pub fn at(self, step: usize, steps: usize) -> f64 {
        let warm = (step as f64 / WARM_UP as f64).min(1.0);
        let left = match self {
            Self::Falling => 1.0 - step as f64 / steps as f64,
            Self::Constant => 1.0,
        };
        LEARNING_RATE * warm * left
    }
}

/// Settings of a training: a line of a table.
#[derive(Clone, Copy, Debug)]
pub struct Arm {
    /// Name in the table.
    pub name: &'static str,
    /// Scores that rank the keys.
    pub scores: Scores,
    /// Number of keys that a query keeps.
    pub window: usize,
    /// Number of runners-up.
    pub runners_up: usize,
    /// The learning rate.
    pub rate: Rate,
}

impl Arm {
    /// Learned scores, with runners-up.
    pub const LEARNED: Self = Self {
        name: "linear, runners-up",
        scores: Scores::Linear,
        window: WINDOW,
        runners_up: RUNNERS_UP,
        rate: Rate::Falling,
    };
    /// Every key is kept.
    pub const DENSE: Self = Self {
        name: "dense",
        window: LENGTH,
        runners_up: 0,
        ..Self::LEARNED
    };
    /// Noise selects the keys.
    pub const RANDOM: Self = Self {
        name: "random",
        scores: Scores::Random,
        runners_up: 0,
        ..Self::LEARNED
    };

    /// The selection of the arm.
    pub fn selector(&self) -> Selector {
        Selector::top(self.window).runners_up(self.runners_up)
    }
}

/// Results of a model on texts that training never drew.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Share of the facts that the first question keeps.
    pub kept: f32,
    /// Share of the questions answered right.
    pub right: f32,
    /// The texts.
    pub texts: Texts,
    /// The selection.
    pub intervals: Intervals,
}

// ANCHOR: train
/// Trains a model and returns its results; calls `report` after every 50th step.
pub fn train(
    arm: Arm,
    seed: u64,
    steps: usize,
    mut report: impl FnMut(usize, f32, &Outcome),
) -> Outcome {
    let device = Device::flex().autodiff();
    let mut random = Random(seed);
    let mut model = Model::seeded(seed, &device);
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let selector = arm.selector();
    for step in 0..steps {
        let texts = Texts::draw(BATCH, &mut random, &device);
        let (logits, _) = model.forward(&texts, arm.scores, &selector);
        let loss = cross_entropy.forward(logits, texts.answers.clone());
        let gradients = loss.backward();
        if step % 50 == 0 {
            let loss = loss.into_scalar::<f32>();
            report(step, loss, &evaluate(&model, arm.scores, &selector));
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(arm.rate.at(step, steps), model, gradients);
    }
    evaluate(&model, arm.scores, &selector)
}
// ANCHOR_END: train

// ANCHOR: evaluate
/// Answers the questions of 64 texts.
pub fn evaluate(model: &Model, scores: Scores, selector: &Selector) -> Outcome {
    let device = model.a.val().device().inner();
    let model = model.valid();
    let texts = Texts::draw(64, &mut Random(u64::MAX), &device);
    let (logits, intervals) = model.forward(&texts, scores, selector);
    let guesses: Tensor<1, Int> = logits.argmax(1).flatten(0, 1);
    let right = guesses.equal(texts.answers.clone()).float().mean();
    let right = right.into_scalar::<f32>();

    // [batch, kv_heads, keys]; a fact is kept if any head keeps it.
    let live = intervals.live_at(LENGTH - FACTS).any_dim(1).into_data();
    let live: Vec<bool> = live.iter().collect();
    let mut kept = 0;
    for (live, places) in live.chunks(LENGTH).zip(&texts.places) {
        kept += places.iter().filter(|&&place| live[place]).count();
    }
    Outcome {
        kept: kept as f32 / (texts.places.len() * FACTS) as f32,
        right,
        texts,
        intervals,
    }
}
// ANCHOR_END: evaluate

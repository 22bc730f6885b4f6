//! The book's tutorial: a model that must learn which keys to keep.
//!
//! `cargo run --release -p tutorial` trains each arm of a table once and prints what it reaches;
//! `cargo run --release -p tutorial -- 3 4 5` does so for other seeds.

mod model;
mod task;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::Selector;
use model::{Model, Scores};
use std::time::Instant;
use task::{FACTS, LENGTH, Random, Texts};

// ANCHOR: settings
const WINDOW: usize = 16;
const RUNNERS_UP: usize = 4;
const BATCH: usize = 32;
const STEPS: usize = 400;
const WARM_UP: usize = 100;
const LEARNING_RATE: f64 = 1e-3;
// ANCHOR_END: settings

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rate {
    /// Falls in a straight line, to nothing at the end.
    Falling,
    /// Stays what it is.
    Constant,
}

impl Rate {
    fn at(self, step: usize) -> f64 {
        let warm = (step as f64 / WARM_UP as f64).min(1.0);
        let left = match self {
            Self::Falling => 1.0 - step as f64 / STEPS as f64,
            Self::Constant => 1.0,
        };
        LEARNING_RATE * warm * left
    }
}

/// A line of the table.
#[derive(Clone, Copy, Debug)]
struct Arm {
    name: &'static str,
    scores: Scores,
    window: usize,
    runners_up: usize,
    rate: Rate,
}

fn arms() -> Vec<Arm> {
    let best = Arm {
        name: "linear, runners-up",
        scores: Scores::Linear,
        window: WINDOW,
        runners_up: RUNNERS_UP,
        rate: Rate::Falling,
    };
    vec![
        Arm {
            name: "dense",
            window: LENGTH,
            runners_up: 0,
            ..best
        },
        best,
        Arm {
            name: "the same, constant rate",
            rate: Rate::Constant,
            ..best
        },
        Arm {
            name: "linear",
            runners_up: 0,
            ..best
        },
        Arm {
            name: "zoh",
            scores: Scores::Zoh,
            runners_up: 0,
            ..best
        },
        Arm {
            name: "random",
            scores: Scores::Random,
            runners_up: 0,
            ..best
        },
    ]
}

fn main() {
    let mut seeds: Vec<u64> = std::env::args()
        .skip(1)
        .map(|seed| seed.parse().expect("the arguments are seeds"))
        .collect();
    if seeds.is_empty() {
        seeds.push(0);
    }
    println!(
        "{LENGTH} tokens, {FACTS} facts; a question may be answered from the keys that are kept"
    );
    let mut table = format!(
        "{:<24} {:>6} {:>10} {:>6} {:>12} {:>9} {:>8}\n",
        "scores", "window", "runners-up", "seed", "facts kept", "answers", "seconds"
    );
    for arm in arms() {
        for &seed in &seeds {
            println!("\n{}, window {}, seed {seed}", arm.name, arm.window);
            let start = Instant::now();
            let (kept, right) = train(arm, seed, STEPS);
            table += &format!(
                "{:<24} {:>6} {:>10} {seed:>6} {:>10.1} % {:>7.1} % {:>8.1}\n",
                arm.name,
                arm.window,
                arm.runners_up,
                100.0 * kept,
                100.0 * right,
                start.elapsed().as_secs_f64(),
            );
        }
    }
    println!("\n{table}");
}

// ANCHOR: train
/// Trains a model and returns the share of the facts it keeps and of the questions it answers.
fn train(arm: Arm, seed: u64, steps: usize) -> (f32, f32) {
    let device = Device::flex().autodiff();
    device.seed(seed);
    let mut random = Random(seed);
    let mut model = Model::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let selector = Selector::top(arm.window).runners_up(arm.runners_up);
    for step in 0..steps {
        let texts = Texts::draw(BATCH, &mut random, &device);
        let (logits, _) = model.forward(&texts, arm.scores, &selector);
        let loss = cross_entropy.forward(logits, texts.answers.clone());
        let gradients = loss.backward();
        if step % 50 == 0 {
            let (kept, right) = evaluate(&model, arm.scores, &selector);
            println!(
                "step {step:4}  loss {:.3}  facts kept {:5.1} %  answers {:5.1} %",
                loss.into_scalar::<f32>(),
                100.0 * kept,
                100.0 * right,
            );
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(arm.rate.at(step), model, gradients);
    }
    evaluate(&model, arm.scores, &selector)
}
// ANCHOR_END: train

// ANCHOR: evaluate
/// On texts that training never drew: the share of the facts that the first question keeps, and of the
/// questions answered right.
fn evaluate(model: &Model, scores: Scores, selector: &Selector) -> (f32, f32) {
    let device = model.a.val().device().inner();
    let model = model.valid();
    let texts = Texts::draw(64, &mut Random(u64::MAX), &device);
    let (logits, intervals) = model.forward(&texts, scores, selector);
    let guesses: Tensor<1, Int> = logits.argmax(1).flatten(0, 1);
    let right = guesses
        .equal(texts.answers.clone())
        .float()
        .mean()
        .into_scalar::<f32>();

    // [batch, kv_heads, keys]; a fact is kept if any head keeps it.
    let live = intervals.live_at(LENGTH - FACTS).any_dim(1).into_data();
    let live: Vec<bool> = live.iter().collect();
    let mut kept = 0;
    for (text, places) in texts.places.iter().enumerate() {
        kept += places
            .iter()
            .filter(|&&place| live[text * LENGTH + place])
            .count();
    }
    (kept as f32 / (texts.places.len() * FACTS) as f32, right)
}
// ANCHOR_END: evaluate

#[cfg(test)]
mod tests {
    use super::{BATCH, Model, Random, STEPS, Scores, Selector, Texts, WARM_UP, arms};
    use burn::tensor::Device;

    #[test]
    fn the_rate_rises_and_then_does_what_the_arm_says() {
        for arm in arms() {
            assert_eq!(arm.rate.at(0), 0.0);
            assert!(arm.rate.at(WARM_UP / 2) < arm.rate.at(WARM_UP));
            let falls = arm.rate.at(STEPS - 1) < arm.rate.at(WARM_UP);
            assert_eq!(falls, arm.rate == super::Rate::Falling);
        }
    }

    /// Only learned scores have a gradient, and runners-up change it.
    #[test]
    fn runners_up_reach_the_scores() {
        let device = Device::flex().autodiff();
        let model = Model::new(&device);
        let texts = Texts::draw(BATCH / 16, &mut Random(0), &device);
        let gradient = |scores, runners_up| -> Option<f32> {
            let selector = Selector::top(16).runners_up(runners_up);
            let gradients = model
                .forward(&texts, scores, &selector)
                .0
                .square()
                .sum()
                .backward();
            let gradient = model.score_proj.val().grad(&gradients)?;
            Some(gradient.abs().sum().into_scalar::<f32>())
        };
        let (kept, all) = (gradient(Scores::Linear, 0), gradient(Scores::Linear, 4));
        assert!(kept.is_some_and(|sum| sum > 0.0));
        assert_ne!(kept, all);
        assert_eq!(gradient(Scores::Random, 4), None);
        assert_eq!(gradient(Scores::Zoh, 4), None);
    }
}

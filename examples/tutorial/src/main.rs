//! The book's tutorial: a model that must learn which keys to keep.
//!
//! `cargo run --release -p tutorial` trains it three times (learned selection, random selection, dense)
//! and prints what each reaches.

mod model;
mod task;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::select;
use model::{Model, Scores};
use std::time::Instant;
use task::{FACTS, LENGTH, Random, Texts};

// ANCHOR: settings
const WINDOW: usize = 16;
const BATCH: usize = 32;
const STEPS: usize = 300;
const LEARNING_RATE: f64 = 5e-3;
// ANCHOR_END: settings

fn main() {
    println!(
        "{LENGTH} tokens, {FACTS} facts; a question may be answered from the keys that are kept\n"
    );
    let mut results = Vec::new();
    for (name, scores, window) in [
        ("learned scores", Scores::Learned, WINDOW),
        ("random scores", Scores::Random, WINDOW),
        ("dense", Scores::Learned, LENGTH),
    ] {
        println!("{name}, window {window}");
        results.push((name, window, train(scores, window)));
        println!();
    }
    println!(
        "{:<16} {:>6} {:>14} {:>10}",
        "scores", "window", "facts kept", "answers"
    );
    for (name, window, (kept, right)) in results {
        println!(
            "{name:<16} {window:>6} {:>12.1} % {:>8.1} %",
            100.0 * kept,
            100.0 * right
        );
    }
}

// ANCHOR: train
/// Trains a model and returns the share of the facts it keeps and of the questions it answers.
fn train(scores: Scores, window: usize) -> (f32, f32) {
    let device = Device::flex().autodiff();
    device.seed(0);
    let mut random = Random(0);
    let mut model = Model::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let start = Instant::now();
    for step in 0..STEPS {
        let texts = Texts::draw(BATCH, &mut random, &device);
        let (logits, _) = model.forward(&texts, scores, window);
        let loss = cross_entropy.forward(logits, texts.answers.clone());
        let gradients = loss.backward();
        if step % 50 == 0 {
            // ANCHOR: gradient
            // A parameter that is no part of the graph (with random scores) has no gradient.
            let to_dt = model.dt_proj.val().grad(&gradients).map(total);
            let to_a = model.a.val().grad(&gradients).map(total);
            let (to_dt, to_a) = (to_dt.unwrap_or(0.0), to_a.unwrap_or(0.0));
            // ANCHOR_END: gradient
            let (kept, right) = evaluate(&model, scores, window);
            println!(
                "step {step:4}  loss {:.3}  facts kept {:5.1} %  answers {:5.1} %  |d dt_proj| {to_dt:.1e}  |d a| {to_a:.1e}",
                loss.into_scalar::<f32>(),
                100.0 * kept,
                100.0 * right,
            );
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        // Falls to nothing in a straight line.
        let rate = LEARNING_RATE * (1.0 - step as f64 / STEPS as f64);
        model = optimizer.step(rate, model, gradients);
    }
    println!("{STEPS} steps in {:.1} s", start.elapsed().as_secs_f64());
    evaluate(&model, scores, window)
}
// ANCHOR_END: train

/// The sum of the absolute values.
fn total<const D: usize>(tensor: Tensor<D>) -> f32 {
    tensor.abs().sum().into_scalar()
}

// ANCHOR: evaluate
/// On texts that training never drew: the share of the facts that the first question keeps, and of the
/// questions answered right.
fn evaluate(model: &Model, scores: Scores, window: usize) -> (f32, f32) {
    let device = model.a.val().device().inner();
    let model = model.valid();
    let texts = Texts::draw(64, &mut Random(u64::MAX), &device);
    let (logits, scores) = model.forward(&texts, scores, window);
    let guesses: Tensor<1, Int> = logits.argmax(1).flatten(0, 1);
    let right = guesses
        .equal(texts.answers.clone())
        .float()
        .mean()
        .into_scalar::<f32>();

    // [batch, kv_heads, keys, 2]: first and end of each key's interval of positions.
    let intervals = select(scores, window)
        .into_tensor()
        .into_data()
        .convert::<i64>()
        .try_to_vec::<i64>()
        .unwrap();
    let first_question = (LENGTH - FACTS) as i64;
    let mut kept = 0;
    for (text, places) in texts.places.iter().enumerate() {
        kept += places
            .iter()
            .filter(|&&place| {
                let at = 2 * (text * LENGTH + place);
                (intervals[at]..intervals[at + 1]).contains(&first_question)
            })
            .count();
    }
    (kept as f32 / (texts.places.len() * FACTS) as f32, right)
}
// ANCHOR_END: evaluate

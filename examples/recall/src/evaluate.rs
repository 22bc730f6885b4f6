//! What a model answers, and what its layers keep.

use crate::model::{Model, Seen};
use crate::settings::Settings;
use crate::task::Batch;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use serde::{Deserialize, Serialize};

/// The seed of the texts to evaluate with, the same for all runs. Training takes the seeds from 0 on.
const EVALUATION_SEED: u64 = u64::MAX;

/// At least so many questions are asked.
const QUESTIONS: usize = 768;

/// A model's answers to the questions of texts that training never draws, and its selections there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The share of right answers.
    pub accuracy: f64,
    /// The share of questions whose fact some kv head of some layer keeps until it is asked for.
    pub kept: f64,
    /// Each layer by itself.
    pub by_layer: Vec<LayerStatistics>,
}

/// What a layer selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerStatistics {
    /// As [`Evaluation::kept`], by the heads of this layer.
    pub kept: f64,
    /// Keys that a position attends to, in the mean.
    pub alive: f64,
    /// Positions that attend to a key, in the mean over the keys that any attends to.
    pub lifetime: f64,
    /// The share of keys that no position attends to.
    pub never_alive: f64,
    /// The share of attended pairs whose key is recent by the rule.
    pub recent: f64,
    /// The share of positions at which an index decides in place of a score.
    pub ties: Option<f64>,
    /// The standard deviation of all scores.
    pub spread: Option<f64>,
}

/// The texts to evaluate with.
pub fn batches(settings: &Settings, device: &Device) -> Vec<Batch> {
    let task = settings.task();
    let texts = QUESTIONS.div_ceil(task.pairs);
    (0..texts.div_ceil(settings.batch))
        .map(|index| task.batch(settings.batch, EVALUATION_SEED, index, device))
        .collect()
}

/// Evaluates a model that is in training, without autodiff. `batches` are on its device without autodiff.
///
/// # Errors
///
/// [`AttentionError`] if the device fails.
pub fn evaluate(model: &Model, batches: &[Batch]) -> Result<Evaluation, AttentionError> {
    let model = model.valid();
    let mut mean = Mean::default();
    for batch in batches {
        let (logits, seen) = model.forward_and_seen(batch)?;
        let answers: Tensor<1, Int> = logits.argmax(1).flatten(0, 1);
        let right = answers.equal(batch.answers.clone()).float().mean();
        mean.add(f64::from(right.into_scalar::<f32>()), batch, &seen);
    }
    Ok(mean.over(batches.len()))
}

/// Sums over batches of equal size.
#[derive(Default)]
struct Mean {
    accuracy: f64,
    kept: f64,
    layers: Vec<LayerStatistics>,
}

impl Mean {
    fn add(&mut self, accuracy: f64, batch: &Batch, seen: &[Seen]) {
        self.accuracy += accuracy;
        self.layers.resize_with(seen.len(), Default::default);
        let kept: Vec<Vec<bool>> = seen.iter().map(|layer| kept(layer, batch)).collect();
        let questions = kept.first().map_or(0, Vec::len);
        let by_any = (0..questions).filter(|&n| kept.iter().any(|layer| layer[n]));
        self.kept += by_any.count() as f64 / questions.max(1) as f64;
        for ((sum, layer), kept) in self.layers.iter_mut().zip(seen).zip(kept) {
            let one = statistics(layer, &kept);
            let optional = |sum: Option<f64>, one: Option<f64>| Some(sum.unwrap_or(0.0) + one?);
            *sum = LayerStatistics {
                kept: sum.kept + one.kept,
                alive: sum.alive + one.alive,
                lifetime: sum.lifetime + one.lifetime,
                never_alive: sum.never_alive + one.never_alive,
                recent: sum.recent + one.recent,
                ties: optional(sum.ties, one.ties),
                spread: optional(sum.spread, one.spread),
            };
        }
    }

    fn over(self, batches: usize) -> Evaluation {
        let count = batches.max(1) as f64;
        let layers = self.layers.into_iter().map(|sum| LayerStatistics {
            kept: sum.kept / count,
            alive: sum.alive / count,
            lifetime: sum.lifetime / count,
            never_alive: sum.never_alive / count,
            recent: sum.recent / count,
            ties: sum.ties.map(|sum| sum / count),
            spread: sum.spread.map(|sum| sum / count),
        });
        Evaluation {
            accuracy: self.accuracy / count,
            kept: self.kept / count,
            by_layer: layers.collect(),
        }
    }
}

/// Whether some head of a layer keeps the fact of each question of a batch until it is asked for.
fn kept(layer: &Seen, batch: &Batch) -> Vec<bool> {
    let questions = (batch.texts.iter().enumerate())
        .flat_map(|(text, drawn)| drawn.questions.iter().map(move |question| (text, question)));
    let Some(intervals) = &layer.intervals else {
        return questions.map(|_| true).collect();
    };
    let [_, heads, len, _] = intervals.tensor().dims();
    let words = intervals.tensor().clone().into_data_as::<i32>();
    let words: Vec<i32> = words.iter::<i32>().collect();
    let end = |text: usize, head: usize, key: usize| {
        words[2 * ((text * heads + head) * len + key) + 1] as usize
    };
    questions
        .map(|(text, q)| (0..heads).any(|head| end(text, head, q.fact) > q.at))
        .collect()
}

fn statistics(layer: &Seen, kept: &[bool]) -> LayerStatistics {
    let right = kept.iter().filter(|&&kept| kept).count();
    let kept = right as f64 / kept.len().max(1) as f64;
    let spread = |scores: &Tensor<3>| {
        let scores = scores.clone().flatten::<1>(0, 2);
        f64::from(scores.var(0).sqrt().into_scalar::<f32>())
    };
    let Some(intervals) = &layer.intervals else {
        return LayerStatistics {
            kept,
            ..LayerStatistics::default()
        };
    };
    let stats = intervals.stats();
    LayerStatistics {
        kept,
        alive: stats.mean_alive,
        lifetime: stats.mean_lifetime,
        never_alive: stats.never_alive,
        recent: stats.recent,
        ties: (layer.scores.as_ref()).map(|scores| intervals.tie_rate(scores)),
        spread: layer.scores.as_ref().map(spread),
    }
}

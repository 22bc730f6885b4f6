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
    /// The share of questions whose fact two or more of its heads keep until it is asked for.
    #[serde(default)]
    pub kept_twice: Option<f64>,
    /// Of the keys that its heads keep when a question is asked, the share that are facts not asked for before.
    #[serde(default)]
    pub open_facts: Option<f64>,
    /// Of the same keys, the share that are facts asked for before.
    #[serde(default)]
    pub asked_facts: Option<f64>,
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
    Ok(mean.over())
}

/// What batches of equal size said, one after the other.
#[derive(Default)]
struct Mean {
    accuracy: Vec<f64>,
    kept: Vec<f64>,
    layers: Vec<Vec<LayerStatistics>>,
}

impl Mean {
    fn add(&mut self, accuracy: f64, batch: &Batch, seen: &[Seen]) {
        self.accuracy.push(accuracy);
        self.layers.resize_with(seen.len(), Default::default);
        let places: Vec<Option<Places>> = seen.iter().map(|layer| places(layer, batch)).collect();
        let questions: usize = batch.texts.iter().map(|text| text.questions.len()).sum();
        let keeps = |layer: &Option<Places>, n: usize| {
            let places = layer.as_ref();
            places.is_none_or(|places| places.keepers[n] > 0)
        };
        let by_any = (0..questions).filter(|&n| places.iter().any(|layer| keeps(layer, n)));
        self.kept
            .push(by_any.count() as f64 / questions.max(1) as f64);
        for ((all, layer), places) in self.layers.iter_mut().zip(seen).zip(places) {
            all.push(statistics(layer, places));
        }
    }

    fn over(self) -> Evaluation {
        let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len().max(1) as f64;
        let by_layer = self.layers.iter().map(|all| {
            let number =
                |of: fn(&LayerStatistics) -> f64| mean(&Vec::from_iter(all.iter().map(of)));
            let optional = |of: fn(&LayerStatistics) -> Option<f64>| {
                let all: Option<Vec<f64>> = all.iter().map(of).collect();
                all.map(|all| mean(&all))
            };
            LayerStatistics {
                kept: number(|layer| layer.kept),
                kept_twice: optional(|layer| layer.kept_twice),
                open_facts: optional(|layer| layer.open_facts),
                asked_facts: optional(|layer| layer.asked_facts),
                alive: number(|layer| layer.alive),
                lifetime: number(|layer| layer.lifetime),
                never_alive: number(|layer| layer.never_alive),
                recent: number(|layer| layer.recent),
                ties: optional(|layer| layer.ties),
                spread: optional(|layer| layer.spread),
            }
        });
        Evaluation {
            accuracy: mean(&self.accuracy),
            kept: mean(&self.kept),
            by_layer: by_layer.collect(),
        }
    }
}

/// What the heads of a layer keep when questions are asked.
struct Places {
    /// How many of the heads keep the fact of each question of a batch.
    keepers: Vec<usize>,
    /// Keys that are kept, added up over questions and heads.
    all: usize,
    /// Those of them that are facts not asked for before.
    open: usize,
    /// Those of them that are facts asked for before.
    asked: usize,
}

/// What is kept; `None` of a layer that attends to all keys.
fn places(layer: &Seen, batch: &Batch) -> Option<Places> {
    let intervals = layer.intervals.as_ref()?;
    let [_, heads, len, _] = intervals.tensor().dims();
    let words = intervals.tensor().clone().into_data_as::<i32>();
    let words: Vec<i32> = words.iter::<i32>().collect();
    let mut places = Places {
        keepers: Vec::new(),
        all: 0,
        open: 0,
        asked: 0,
    };
    let mut rows = words.chunks_exact(2 * len);
    for drawn in &batch.texts {
        let questions = &drawn.questions;
        // They are in the order of their positions.
        let before = |position: usize| questions.partition_point(|question| question.at < position);
        let within = |from: usize, to: usize| before(to).saturating_sub(before(from));
        let first = places.keepers.len();
        places.keepers.resize(first + questions.len(), 0);
        for row in rows.by_ref().take(heads) {
            let interval = |key: usize| (row[2 * key] as usize, row[2 * key + 1] as usize);
            for (from, to) in (0..len).map(interval) {
                places.all += within(from, to);
            }
            for (question, keepers) in questions.iter().zip(&mut places.keepers[first..]) {
                let ((from, to), answered) = (interval(question.fact), question.at + 1);
                places.open += within(from, to.min(answered));
                places.asked += within(from.max(answered), to);
                *keepers += usize::from((from..to).contains(&question.at));
            }
        }
    }
    Some(places)
}

fn statistics(layer: &Seen, places: Option<Places>) -> LayerStatistics {
    let spread = |scores: &Tensor<3>| {
        let scores = scores.clone().flatten::<1>(0, 2);
        f64::from(scores.var(0).sqrt().into_scalar::<f32>())
    };
    let (Some(intervals), Some(places)) = (&layer.intervals, places) else {
        return LayerStatistics {
            kept: 1.0,
            ..LayerStatistics::default()
        };
    };
    let stats = intervals.stats();
    let by = |least: usize| {
        let kept = places.keepers.iter().filter(|&&heads| heads >= least);
        kept.count() as f64 / places.keepers.len().max(1) as f64
    };
    let of_all = |keys: usize| keys as f64 / places.all.max(1) as f64;
    LayerStatistics {
        kept: by(1),
        kept_twice: Some(by(2)),
        open_facts: Some(of_all(places.open)),
        asked_facts: Some(of_all(places.asked)),
        alive: stats.mean_alive,
        lifetime: stats.mean_lifetime,
        never_alive: stats.never_alive,
        recent: stats.recent,
        ties: (layer.scores.as_ref()).map(|scores| intervals.tie_rate(scores)),
        spread: layer.scores.as_ref().map(spread),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::task::{Question, Text, ints};
    use burn_flash_dma::Intervals;

    #[test]
    fn places_are_counted_when_questions_are_asked() {
        let device = Device::flex();
        let ask = |at, fact| Question {
            at,
            fact,
            answer: 0,
        };
        let batch = Batch {
            texts: vec![Text {
                tokens: vec![0; 8],
                questions: vec![ask(5, 3), ask(6, 1)],
            }],
            tokens: Tensor::zeros([1, 8], &device),
            rows: Tensor::zeros([2], &device),
            answers: Tensor::zeros([2], &device),
        };
        // The first head keeps keys 0 and 1 to the end, and key 3 until its question comes; the second 1 and 3 until
        // both have been asked for.
        let ends = [[8, 8, 2, 5, 4, 5, 6, 7], [0, 7, 2, 7, 4, 5, 6, 7]];
        let ends = ints(ends.into_iter().flatten(), [1, 16], &device).reshape([1, 2, 8]);
        let layer = Seen {
            intervals: Some(Intervals::try_from_ends(ends).expect("they are ends")),
            scores: None,
        };
        let places = places(&layer, &batch).expect("it prunes");
        assert_eq!(places.keepers, [1, 2]);
        assert_eq!((places.all, places.open, places.asked), (8, 5, 1));

        let layer = statistics(&layer, Some(places));
        assert_eq!((layer.kept, layer.kept_twice), (1.0, Some(0.5)));
        assert_eq!(
            (layer.open_facts, layer.asked_facts),
            (Some(5.0 / 8.0), Some(1.0 / 8.0))
        );
    }
}

//! Evaluation: the answers of a model, and the keys its layers keep.

use super::model::{Model, Seen};
use super::task::Batch;
use crate::layers::LayerStatistics;
use crate::settings::Settings;
use crate::train::{Evaluation, scalar};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::{AttentionError, Intervals};
use serde::{Deserialize, Serialize};

/// Seed of the texts for evaluation, the same for all runs. Training takes the seeds from 0 on.
const EVALUATION_SEED: u64 = u64::MAX;

/// Minimum number of questions asked.
const QUESTIONS: usize = 768;

/// Facts that a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// [`Evaluation::kept`] for the heads of this layer.
    pub kept: f64,
    /// Share of questions whose fact two or more of its heads keep until it is asked for.
    pub kept_twice: f64,
    /// Share of the keys its heads keep at a question that are facts not asked for before.
    pub open_facts: f64,
    /// Share of the same keys that are facts asked for before.
    pub asked_facts: f64,
}

/// Texts for evaluation.
pub fn texts(settings: &Settings, device: &Device) -> Batch {
    let task = settings.recall();
    task.batch(QUESTIONS.div_ceil(task.pairs), EVALUATION_SEED, 0, device)
}

/// Evaluates a model without autodiff on texts without it.
pub fn evaluate(model: &Model, batch: &Batch) -> Result<Evaluation, AttentionError> {
    let (logits, seen) = model.forward_and_seen(batch)?;
    let answers: Tensor<1, Int> = logits.argmax(1).flatten(0, 1);
    let right = answers.equal(batch.answers.clone()).float().mean();
    let of = |layer: &Seen| (layer.intervals.as_ref()).map(|keys| Places::of(keys, batch));
    let places: Vec<Option<Places>> = seen.iter().map(of).collect();
    let questions: usize = batch.texts.iter().map(|text| text.questions.len()).sum();
    let keeps = |layer: &Option<Places>, n: usize| {
        let places = layer.as_ref();
        places.is_none_or(|places| places.keepers[n] > 0)
    };
    let by_any = (0..questions).filter(|&n| places.iter().any(|layer| keeps(layer, n)));
    let statistics = |(layer, places): (&Seen, &Option<Places>)| {
        let (intervals, places) = (layer.intervals.as_ref()?, places.as_ref()?);
        Some(LayerStatistics {
            facts: Some(places.facts()),
            ..LayerStatistics::of(intervals, layer.scores.as_ref())
        })
    };
    Ok(Evaluation {
        accuracy: Some(scalar(right)),
        kept: Some(by_any.count() as f64 / questions.max(1) as f64),
        by_layer: seen.iter().zip(&places).map(statistics).collect(),
        ..Evaluation::default()
    })
}

/// Keys that the heads of a layer keep at questions.
#[derive(Default)]
struct Places {
    /// Number of heads that keep the fact of each question of a batch.
    keepers: Vec<usize>,
    /// Number of kept keys, summed over questions and heads.
    all: usize,
    /// Kept facts not asked for before.
    open: usize,
    /// Kept facts asked for before.
    asked: usize,
}

impl Places {
    /// Counts for a batch.
    fn of(intervals: &Intervals, batch: &Batch) -> Self {
        let [_, heads, len, _] = intervals.tensor().dims();
        let words = intervals.tensor().clone().into_data_as::<i32>();
        let words: Vec<i32> = words.iter::<i32>().collect();
        let mut places = Self::default();
        let mut rows = words.chunks_exact(2 * len);
        for drawn in &batch.texts {
            let questions = &drawn.questions;
            // They are in the order of their positions.
            let before = |position| questions.partition_point(|question| question.at < position);
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
        places
    }

    fn facts(&self) -> Facts {
        let by = |least: usize| {
            let kept = self.keepers.iter().filter(|&&heads| heads >= least);
            kept.count() as f64 / self.keepers.len().max(1) as f64
        };
        let of_all = |keys: usize| keys as f64 / self.all.max(1) as f64;
        Facts {
            kept: by(1),
            kept_twice: by(2),
            open_facts: of_all(self.open),
            asked_facts: of_all(self.asked),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::recall::task::{Question, Text, ints};

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
        let intervals = Intervals::try_from_ends(ends).expect("they are ends");
        let places = Places::of(&intervals, &batch);
        assert_eq!(places.keepers, [1, 2]);
        assert_eq!((places.all, places.open, places.asked), (8, 5, 1));
        let facts = places.facts();
        assert_eq!((facts.kept, facts.kept_twice), (1.0, 0.5));
        assert_eq!([facts.open_facts, facts.asked_facts], [0.625, 0.125]);
    }
}

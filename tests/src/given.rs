//! Attention over given intervals, some of which no selection by scores could have made.

use crate::expected::{Expected, Learning, attended, expected_of_rank, masked, runners_up};
use crate::{Call, Engine, Grads, Layout, problem};
use flash_dma_problem::{AttentionOptions, ElementType, Interval, Problem};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Inputs, compose};

/// A problem whose keys have the given intervals, with random inputs.
#[derive(Clone, Debug)]
pub struct GivenCase {
    /// Query heads, kv heads, queries, elements per row; the intervals give the number of keys.
    pub sizes: [usize; 4],
    /// Element type.
    pub element: ElementType,
    /// Causal masking, which documents need.
    pub causal: bool,
    /// The intervals of each kv head.
    pub intervals: Vec<Vec<Interval>>,
    /// One past the last position at which each key of each kv head is a runner-up; `None` without runners-up.
    pub far: Option<Vec<Vec<u32>>>,
    /// A description of the case, for failures.
    pub what: String,
}

impl GivenCase {
    /// The problem: its window is the most keys that are alive at one position.
    pub fn problem(&self) -> Problem {
        let most = self.intervals.iter().map(|head| compose::max_live(head));
        let options = AttentionOptions::new()
            .with_keep_window(most.max().unwrap_or(0).max(1))
            .with_causal(self.causal);
        let [q_heads, kv_heads, q_len, dim] = self.sizes;
        let kv = [1, kv_heads, self.intervals[0].len(), dim];
        problem([1, q_heads, q_len, dim], kv, true, self.element, &options)
    }

    /// Compares everything that the engine computes with the oracle of masks, which has no intervals.
    pub fn check<E: Engine>(&self, engine: &E) {
        if engine.lacks(self.element) {
            return;
        }
        let p = self.problem();
        let inputs = generate::inputs(p, Scores::Normal, 1.0, 31);
        let grads = Grads::random(&p, 31);
        let mut call = Call::new(&inputs, Layout::Contiguous, &grads);
        call.intervals = Some(self.intervals.concat());
        call.runner_up_ends = self.far.as_ref().map(|far| far.concat());
        call.given = true;
        let (outputs, actual) = engine.backward(&call).unwrap_or_else(|refused| {
            panic!("{} refuses {}: {}", E::NAME, self.what, refused.error)
        });
        assert!(actual.scores.is_some(), "the gradient of the scores");
        let what = format!("{} at {}", E::NAME, self.what);
        let expected = self.expected(&inputs, &grads, actual.rank.is_some());
        expected.check(Vec::new, &outputs, &actual.given(), what);
    }

    /// The results by definition. The gradient of the rank is separate if `apart`, otherwise in that of the scores.
    fn expected(&self, inputs: &Inputs, grads: &Grads, apart: bool) -> Expected {
        let (p, intervals) = (&inputs.problem, self.intervals.concat());
        let far = self.far.as_ref();
        let learning = Learning {
            runners_up: far.map(|far| runners_up(p, &intervals, &far.concat())),
            ..Learning::default()
        };
        let masked = masked(
            inputs,
            Some(attended(p, &intervals)),
            inputs.scores.as_ref(),
        );
        expected_of_rank(&masked, &learning, grads, apart)
    }
}

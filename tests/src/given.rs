//! Attention over given intervals: no selection by scores could have made some of them.

use crate::engine::skip;
use crate::expected::Expected;
use crate::{Call, Engine, Layout, problem};
use flash_dma_problem::{AttentionOptions, ElementType, Interval, Problem};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::{Inputs, compose};

/// A problem whose keys have the given intervals, with random inputs.
#[derive(Clone, Debug)]
pub struct GivenCase {
    /// Query heads, kv heads, queries, elements per row; the intervals have the number of keys.
    pub sizes: [usize; 4],
    /// Element type.
    pub element: ElementType,
    /// Causal masking, which documents need.
    pub causal: bool,
    /// The intervals of each kv head.
    pub intervals: Vec<Vec<Interval>>,
    /// What the case is, for failures.
    pub what: String,
}

impl GivenCase {
    /// The problem: its window is the most keys that are alive at one position.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let most = self.intervals.iter().map(|head| compose::max_live(head));
        let options = AttentionOptions::new()
            .with_keep_window(most.max().unwrap_or(0).max(1))
            .with_causal(self.causal);
        self.problem_with(&options, true)
    }

    fn problem_with(&self, options: &AttentionOptions, scores: bool) -> Problem {
        let [q_heads, kv_heads, q_len, dim] = self.sizes;
        let (q, kv) = (
            [1, q_heads, q_len, dim],
            [1, kv_heads, self.intervals[0].len(), dim],
        );
        problem(q, kv, scores, self.element, options)
    }

    /// Compares everything that the engine computes with the oracle of masks, which has no intervals.
    ///
    /// # Panics
    ///
    /// If a tensor is wrong, with the worst element of each.
    pub fn check<E: Engine>(&self, engine: &E) {
        if !engine.supports(self.element) {
            skip::<E>(&format!("{}", self.element));
            return;
        }
        let p = self.problem();
        let inputs = generate::inputs(p, Scores::Normal, 1.0, 31);
        let (grad_out, grad_lse) = generate::gradients(&p, 31);
        let grads = (&grad_out[..], Some(&grad_lse[..]));
        let mut call = Call::new(&inputs, Layout::Contiguous, grads);
        call.intervals = Some(self.intervals.concat());
        call.given = true;
        let (outputs, actual) = engine.backward(&call).unwrap_or_else(|refused| {
            panic!("{} refuses {}: {}", E::NAME, self.what, refused.error)
        });
        let actual_scores = actual.scores.expect("the gradient of the scores");
        let gradients = [&actual.q[..], &actual.k, &actual.v, &actual_scores];
        self.expected(&inputs, &grad_out, &grad_lse).check(
            Vec::new,
            &outputs,
            &gradients,
            format!("{} at {}", E::NAME, self.what),
        );
    }

    fn expected(&self, inputs: &Inputs, grad_out: &[f64], grad_lse: &[f64]) -> Expected {
        let options = AttentionOptions::new().with_causal(self.causal);
        let p = self.problem_with(&options, false);
        let scores = inputs.scores.clone().expect("a case with scores");
        let shape = [1, p.kv_heads, p.q_len, p.k_len];
        let pairs = self.intervals.iter().flat_map(|head| {
            let row = move |query| head.iter().map(move |i| i.contains(p.position(query)));
            (0..p.q_len).flat_map(row)
        });
        let masked = MaskedInputs {
            problem: p,
            q: inputs.q.clone(),
            k: inputs.k.clone(),
            v: inputs.v.clone(),
            visible: Some(Broadcast {
                shape,
                values: pairs.collect(),
            }),
            bias: Some(Broadcast {
                shape: [1, p.kv_heads, 1, p.k_len],
                values: scores,
            }),
        };
        let mut expected = Expected::new(&p, masked.forward(), &masked.naive_forward());
        let exact = masked.backward(grad_out, Some(grad_lse));
        let (naive, naive_scores) = masked.naive_backward(grad_out, Some(grad_lse));
        let (q, kv, e) = (p.q_shape(), p.kv_shape(), p.element);
        expected.gradient("dq", &q, e, exact.q, &naive.q);
        expected.gradient("dk", &kv, e, exact.k, &naive.k);
        expected.gradient("dv", &kv, e, exact.v, &naive.v);
        let (exact, naive) = (exact.bias.expect("a bias"), naive_scores.expect("a bias"));
        expected.gradient("dscores", &kv[..3], ElementType::F32, exact, &naive);
        expected
    }
}

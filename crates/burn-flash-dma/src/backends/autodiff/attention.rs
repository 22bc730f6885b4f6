//! Gradients of dynamic-mask attention: one fused backward pass for whichever of q, k, v, scores and rank are
//! tracked.

use super::node::{self, Pass, Recorded, first_order, record};
use crate::fallback::sink;
use crate::ops::attention::DynamicMaskOps;
use crate::types::{
    AttentionGrads, Forwarded, OptionalFloat, RankLearning, Saved, Selection, Wanted,
};
use burn::backend::AutodiffBackend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use flash_dma_problem::{KeptKeys, Problem, TensorName, tensors};

impl<B: DynamicMaskOps, C: CheckpointStrategy> DynamicMaskOps for Autodiff<B, C> {
    fn dynamic_mask_select(scores: FloatTensor<Self>, kept: KeptKeys) -> IntTensor<Self> {
        // The selection is a constant.
        B::dynamic_mask_select(scores.into_primitive(), kept)
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let (pass, [scores, rank]) = Selected::new(selection, problem);
        let inputs = [Some(q), Some(k), Some(v), None, scores, rank];
        record::<B, C, _, INPUTS>(inputs, pass, wanted)
    }

    fn dynamic_mask_forward_with_sink(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (pass, [scores, rank]) = Selected::new(selection, problem);
        let inputs = [Some(q), Some(k), Some(v), Some(logits), scores, rank];
        let results = record::<B, C, _, INPUTS>(inputs, pass, Wanted::OutAndLse);
        (results.out, results.lse)
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        let of_scores =
            matches!(&selection, Selection::Scored { scores, .. } if scores.is_tracked());
        let of_lse = saved.grad_lse.as_option().is_some_and(|t| t.is_tracked());
        first_order([
            (TensorName::Query, q.is_tracked()),
            (TensorName::Key, k.is_tracked()),
            (TensorName::Value, v.is_tracked()),
            (TensorName::Scores, of_scores),
            (TensorName::GradOut, saved.grad_out.is_tracked()),
            (TensorName::GradLse, of_lse),
        ]);
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let (selection, saved) = (inner(selection), node::inner(saved));
        let grads = B::dynamic_mask_backward(q, k, v, selection, saved, problem);
        let grads = (grads.into_tensors()).map(Self::from_inner, Self::from_inner);
        AttentionGrads::from_tensors(grads)
    }
}

fn inner<B: DynamicMaskOps, C: CheckpointStrategy>(
    selection: Selection<Autodiff<B, C>>,
) -> Selection<B> {
    match selection {
        Selection::All => Selection::All,
        Selection::Scored {
            scores,
            intervals,
            learning,
        } => {
            let learning = learning.into_parts();
            let learning = learning.map(|(learning, rank)| (learning, rank.into_primitive()));
            Selection::Scored {
                scores: scores.into_primitive(),
                intervals,
                learning: RankLearning::from_parts(learning),
            }
        }
    }
}

/// The inputs of a pass: q, k and v, the sink logits, the scores and the rank.
const INPUTS: usize = 6;

const LOGITS: usize = 3;
const SCORES: usize = 4;
const RANK: usize = 5;

/// Dynamic-mask attention: all of it but its [`INPUTS`].
#[derive(Clone, Debug)]
struct Selected<B: DynamicMaskOps> {
    /// Present with scores.
    intervals: Option<IntTensor<B>>,
    /// Present with a rank that learns. It may be the tensor of the scores, which then gets both gradients.
    learning: Option<tensors::RankLearning<IntTensor<B>>>,
    problem: Problem,
}

impl<B: DynamicMaskOps> Selected<B> {
    /// The pass, and the scores and the rank of the selection.
    fn new<C: CheckpointStrategy>(
        selection: Selection<Autodiff<B, C>>,
        problem: Problem,
    ) -> (Self, [Option<Recorded<B, C>>; 2]) {
        let (intervals, scores, learning) = match selection {
            Selection::All => (None, None, None),
            Selection::Scored {
                scores,
                intervals,
                learning,
            } => (Some(intervals), Some(scores), learning.into_parts()),
        };
        let (learning, rank) = learning.unzip();
        let pass = Self {
            intervals,
            learning,
            problem,
        };
        (pass, [scores, rank])
    }

    fn selection(
        &self,
        scores: Option<FloatTensor<B>>,
        learning: Option<(tensors::RankLearning<IntTensor<B>>, FloatTensor<B>)>,
    ) -> Selection<B> {
        match (self.intervals.clone(), scores) {
            (Some(intervals), Some(scores)) => Selection::Scored {
                scores,
                intervals,
                learning: RankLearning::from_parts(learning),
            },
            _ => Selection::All,
        }
    }
}

impl<B: DynamicMaskOps> Pass<B, INPUTS> for Selected<B> {
    fn forward(&self, inputs: [Option<FloatTensor<B>>; INPUTS], wanted: Wanted) -> Forwarded<B> {
        let [q, k, v, logits, scores, _] = inputs;
        let [q, k, v] = [q, k, v].map(|rows| rows.expect("q, k and v"));
        let selection = self.selection(scores, None);
        match logits {
            None => B::dynamic_mask_forward(q, k, v, selection, self.problem, wanted),
            Some(logits) => {
                let saved = Wanted::Saved;
                let results = B::dynamic_mask_forward(q, k, v, selection, self.problem, saved);
                sink::with_sink::<B>(results, logits)
            }
        }
    }

    fn backward(
        mut self,
        inputs: [Option<FloatTensor<B>>; INPUTS],
        saved: Saved<B>,
        tracked: [bool; INPUTS],
    ) -> [Option<FloatTensor<B>>; INPUTS] {
        let [q, k, v, logits, scores, rank] = inputs;
        let [q, k, v] = [q, k, v].map(|rows| rows.expect("q, k and v"));
        // A constant rank accumulates nothing.
        let learning = self.learning.take().filter(|_| tracked[RANK]).zip(rank);
        let of_logits =
            (logits.filter(|_| tracked[LOGITS])).map(|logits| sink::gradient::<B>(&saved, logits));
        // Constant scores accumulate nothing either, and sums that nobody reads take time.
        let problem = match scores.is_some() && !tracked[SCORES] {
            true => self.problem.with_constant_scores(),
            false => self.problem,
        };
        let selection = self.selection(scores, learning);
        // With the output and the LSE of all logits, the weights of keys, the gains of runners-up and the worth of
        // kept keys include the sink.
        let grads = B::dynamic_mask_backward(q, k, v, selection, saved, problem);
        let [scores, rank] = [grads.scores, grads.rank].map(OptionalFloat::into_option);
        let [q, k, v] = [grads.q, grads.k, grads.v].map(Some);
        [q, k, v, of_logits, scores, rank]
    }
}

//! Gradients of dynamic-mask attention: one fused backward pass for whichever of q, k, v, scores and rank are
//! tracked.

use super::node::{self, Pass, Recorded, constants, first_order, record};
use crate::fallback::sink;
use crate::ops::attention::DynamicMaskOps;
use crate::types::{AttentionGrads, Forwarded, OptionalFloat, RankLearning, Saved, Selection};
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
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], None, selection, problem, false)
    }

    fn dynamic_mask_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> Forwarded<Self> {
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let selection = inner(selection);
        constants(B::dynamic_mask_forward_with_residual(
            q, k, v, selection, problem,
        ))
    }

    fn dynamic_mask_forward_with_lse(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], None, selection, problem, true)
    }

    fn dynamic_mask_forward_with_sink(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], Some(logits), selection, problem, true)
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

/// Records the pass of q, k, v, the sink logits if any, with intervals the scores, and with runners-up the rank.
fn run<B: DynamicMaskOps, C: CheckpointStrategy>(
    [q, k, v]: [Recorded<B, C>; 3],
    logits: Option<Recorded<B, C>>,
    selection: Selection<Autodiff<B, C>>,
    problem: Problem,
    differentiable_lse: bool,
) -> (Recorded<B, C>, Recorded<B, C>) {
    let mut pass = Selected {
        has_sink: logits.is_some(),
        intervals: None,
        learning: None,
        problem,
    };
    let mut inputs = vec![q, k, v];
    inputs.extend(logits);
    if let Selection::Scored {
        scores,
        intervals,
        learning,
    } = selection
    {
        pass.intervals = Some(intervals);
        inputs.push(scores);
        if let Some((learning, rank)) = learning.into_parts() {
            pass.learning = Some(learning);
            inputs.push(rank);
        }
    }
    match inputs.len() {
        3 => record_all::<B, C, 3>(inputs, pass, differentiable_lse),
        4 => record_all::<B, C, 4>(inputs, pass, differentiable_lse),
        5 => record_all::<B, C, 5>(inputs, pass, differentiable_lse),
        _ => record_all::<B, C, 6>(inputs, pass, differentiable_lse),
    }
}

fn record_all<B: DynamicMaskOps, C: CheckpointStrategy, const N: usize>(
    inputs: Vec<Recorded<B, C>>,
    pass: Selected<B>,
    differentiable_lse: bool,
) -> (Recorded<B, C>, Recorded<B, C>) {
    let inputs: [Recorded<B, C>; N] = inputs.try_into().expect("as many as were counted");
    record::<B, C, _, N>(inputs, pass, differentiable_lse)
}

/// Dynamic-mask attention of q, k, v, sink logits, with intervals the scores, and with runners-up the rank.
#[derive(Clone, Debug)]
struct Selected<B: DynamicMaskOps> {
    /// True if the fourth input is the sink logits.
    has_sink: bool,
    intervals: Option<IntTensor<B>>,
    /// Present if a rank learns, which is the last input. It may be the tensor of the scores, which then gets both
    /// gradients.
    learning: Option<tensors::RankLearning<IntTensor<B>>>,
    problem: Problem,
}

/// The inputs of a pass by role: q, k and v, the sink logits, and the selection.
type Unpacked<B> = ([FloatTensor<B>; 3], Option<FloatTensor<B>>, Selection<B>);

impl<B: DynamicMaskOps, const N: usize> Pass<B, N> for Selected<B> {
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, FloatTensor<B>) {
        let ([q, k, v], logits, selection) = self.unpack(inputs, None);
        match logits {
            None => B::dynamic_mask_forward(q, k, v, selection, self.problem),
            Some(logits) => {
                B::dynamic_mask_forward_with_sink(q, k, v, logits, selection, self.problem)
            }
        }
    }

    fn forward_with_residual(&self, inputs: [FloatTensor<B>; N]) -> Forwarded<B> {
        let ([q, k, v], logits, selection) = self.unpack(inputs, None);
        let results = B::dynamic_mask_forward_with_residual(q, k, v, selection, self.problem);
        match logits {
            None => results,
            Some(logits) => sink::with_sink::<B>(results, logits),
        }
    }

    fn backward(
        mut self,
        inputs: [FloatTensor<B>; N],
        saved: Saved<B>,
        tracked: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        // A constant rank, the last input, accumulates nothing.
        let learning = self.learning.take().filter(|_| tracked[N - 1]);
        let ([q, k, v], logits, selection) = self.unpack(inputs, learning);
        let of_logits =
            logits.map(|logits| tracked[LOGITS].then(|| sink::gradient::<B>(&saved, logits)));
        // Constant scores accumulate nothing either, and sums that nobody reads take time.
        let problem = match tracked.get(3 + usize::from(self.has_sink)) {
            Some(false) => self.problem.with_constant_scores(),
            _ => self.problem,
        };
        // With the output and the LSE of all logits, the weights of keys, the gains of runners-up and the worth of
        // kept keys include the sink.
        let grads = B::dynamic_mask_backward(q, k, v, selection, saved, problem);
        let [scores, rank] = [grads.scores, grads.rank].map(OptionalFloat::into_option);
        let rows = [grads.q, grads.k, grads.v].map(Some);
        let others = of_logits.into_iter().chain([scores, rank]);
        let mut grads = rows.into_iter().chain(others);
        std::array::from_fn(|_| grads.next().flatten())
    }
}

/// Index of the sink logits among the inputs.
const LOGITS: usize = 3;

impl<B: DynamicMaskOps> Selected<B> {
    fn unpack<const N: usize>(
        &self,
        inputs: [FloatTensor<B>; N],
        learning: Option<tensors::RankLearning<IntTensor<B>>>,
    ) -> Unpacked<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || (inputs.next()).expect("as many as the pass was recorded with");
        let rows = [next(), next(), next()];
        let logits = self.has_sink.then(&mut next);
        let selection = match self.intervals.clone() {
            None => Selection::All,
            Some(intervals) => Selection::Scored {
                scores: next(),
                intervals,
                learning: RankLearning::from_parts(learning.map(|learning| (learning, next()))),
            },
        };
        (rows, logits, selection)
    }
}

//! Attention to the keys of greatest score: [`forward`], [`backward`].

use crate::args::{Gradients, Inputs, Outputs, Saved};
use crate::attention::backward::{Targets, backward as differentiate};
use crate::attention::bias_gradient::BiasGradient;
use crate::attention::forward::forward as attend;
use crate::attention::rank::{Added, LeftOut, rank as add_to_rank};
use crate::check;
use crate::element::Element;
use crate::keys::intervals::RankedPositions;
use crate::keys::operands::Operands;
use flash_dma_problem::{AttentionError, Problem};

/// Attention: writes the [`Outputs`].
///
/// Query `i` of head `h` attends to the keys whose interval contains its
/// [position](Problem::position), with logits `softcap(scale · q·k) + score`. A query that attends to
/// nothing, or to logits of −∞ only, gets zeros and an LSE of −∞. Arithmetic is f32.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape. Nothing is written
/// then.
pub fn forward<E: Element>(
    problem: &Problem,
    inputs: Inputs<'_, E>,
    outputs: Outputs<'_, E>,
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    check::outputs(problem, &outputs)?;
    attend(&Operands::scored(problem, &inputs), outputs);
    Ok(())
}

/// The gradients of [`forward`] for q, k, v and the scores; the selection is a constant. With a
/// [`RankLearning`](crate::RankLearning), also the gradient of the tensor that ranks the keys: for each query and each of its runners-up,
/// the change of the loss if the key were attended, and for each kept key that learns what it is
/// [worth](flash_dma_problem::OWN_OUTPUT_WEIGHT).
///
/// `grads.k`, `grads.v` and `grads.scores` sum over the query heads of a group. A query that attends to nothing and a
/// key that nothing attends to have gradients of exactly 0, whatever they hold. In addition to the outputs the pass
/// holds f32 gradients of the keys that each of at most 8 chunks of queries per head touches: memory linear in the
/// lengths.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape. Nothing is written
/// then.
pub fn backward<E: Element>(
    problem: &Problem,
    inputs: Inputs<'_, E>,
    saved: Saved<'_, E>,
    grads: Gradients<'_, E>,
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    check::saved(problem, &saved)?;
    check::gradients(problem, &inputs, &grads)?;
    let targets = Targets {
        q: grads.q,
        k: grads.k,
        v: grads.v,
        bias: (grads.scores).map_or(BiasGradient::Ignored, BiasGradient::Scores),
    };
    differentiate(&Operands::scored(problem, &inputs), &saved, targets);
    if let (Some(selection), Some(rank)) = (inputs.selection, grads.rank) {
        rank.fill(0.0);
        let learning = selection.learning.expect("a rank comes with it");
        let ranked = |positions| Operands::ranked(problem, &inputs, positions);
        let runners_up = ranked(RankedPositions::RunnersUp(learning.ends));
        add_to_rank(&runners_up, &saved, Added, rank);
        if let Some(from) = learning.kept_from {
            let kept = ranked(RankedPositions::Kept(from));
            add_to_rank(&kept, &saved, LeftOut, rank);
        }
    }
    Ok(())
}

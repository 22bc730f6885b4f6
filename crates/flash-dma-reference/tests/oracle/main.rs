//! The oracle against closed forms, central differences and itself.

mod alibi;
mod attention;
mod composition;
mod dropout;
mod gradients;
mod sampled;
mod selection;

use flash_dma_reference::Inputs;
use flash_dma_reference::masked::{Broadcast, MaskedInputs};

/// The same q, k and v under a mask and a bias in place of the scores.
fn masked(
    inputs: &Inputs,
    visible: Option<Broadcast<bool>>,
    bias: Option<Broadcast<f64>>,
) -> MaskedInputs {
    let mut problem = inputs.problem;
    problem.has_scores = false;
    MaskedInputs {
        problem,
        q: inputs.q.clone(),
        k: inputs.k.clone(),
        v: inputs.v.clone(),
        visible,
        bias,
    }
}

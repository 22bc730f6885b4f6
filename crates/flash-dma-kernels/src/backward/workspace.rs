//! What the backward pass needs on the device beside its arguments.

use crate::args::{Inputs, Saved};
use crate::backward::launch::Plan;
use crate::host::engine::Engine;
use cubecl::client::Client;
use flash_dma_problem::{AttentionError, Problem};

/// The bytes that [`backward`](crate::backward()) needs on the device beside its arguments, known before it is called:
/// the buffers that it holds at once at most, each as it is requested. These are a sum or three for each query row, lists of
/// keys, and on the tensor-core engines the sums or parts of the gradients of k and v that its documentation names.
///
/// A buffer is free for the next request on the stream once the launches that use it are enqueued, so calls one after
/// the other need as much as the greatest of them. The client's pool rounds sizes up and keeps what it has.
///
/// # Errors
///
/// As [`backward`](crate::backward()), but for what concerns the buffers of the tensors, of which only the strides are
/// looked at.
pub fn backward_workspace(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
) -> Result<usize, AttentionError> {
    let (_, plan) = Plan::choose(client, problem, inputs, saved)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

/// The bytes that [`backward_on`](crate::backward::launch::backward_on) needs, as [`backward_workspace`] counts them.
///
/// # Errors
///
/// As [`backward_workspace`]; further [`AttentionError::Unsupported`] if the engine does not serve the problem.
pub fn backward_workspace_on(
    engine: Engine,
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
) -> Result<usize, AttentionError> {
    let plan = Plan::of(engine, client, problem, inputs, saved)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

impl Plan {
    /// The bytes of the buffers that a pass holds at once at most.
    fn workspace(&self, problem: &Problem) -> usize {
        if problem.batch * problem.q_len * problem.k_len == 0 {
            return 0;
        }
        match self {
            Self::Portable(blueprints) => blueprints.workspace(problem),
            Self::Mma(blueprints) => blueprints.workspace(problem),
        }
    }
}

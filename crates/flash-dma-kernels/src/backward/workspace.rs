//! The memory that the backward pass needs on the device besides its arguments.

use crate::args::{Inputs, Saved};
use crate::backward::launch::Plan;
use crate::host::engine::Engine;
use cubecl::client::Client;
use flash_dma_problem::{AttentionError, Problem};

/// The bytes that [`backward`](crate::backward()) needs on the device besides its arguments, known before it is called:
/// the peak total of the buffers that it holds at once, each at its requested size. These are one or three f32 per
/// query row, lists of keys, and, on the tensor-core engines, the sums or parts of the gradients of k and v that its
/// documentation names.
///
/// A buffer is free for the next request on the stream once the launches that use it are enqueued, so consecutive calls
/// need as much as the largest of them. The client's pool rounds sizes up and keeps its memory.
///
/// # Errors
///
/// As [`backward`](crate::backward()), but for the checks of the tensors' buffers: only the strides are used here.
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
/// As [`backward_workspace`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
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
    /// The peak number of bytes in buffers that a pass holds at once.
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

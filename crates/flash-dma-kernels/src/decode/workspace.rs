//! The memory that a decode step needs on the device besides its arguments.

use crate::decode::append::moves_shape;
use crate::decode::args::Tokens;
use crate::decode::launch::{DecodeTuning, Plan};
use crate::decode::parts::part_shapes;
use crate::host::engine::Engine;
use crate::host::scratch::bytes;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, DecodeProblem, Storage};

/// The bytes that [`decode`](crate::decode()) or [`decode_pages`](crate::decode::launch::decode_pages) needs on the
/// device besides its arguments, known before it is called: the total of the buffers that it holds at once, each at its
/// requested size. They depend on the capacity of the cache, not on its content.
///
/// # Errors
///
/// As [`decode`](crate::decode()), but for the checks of the tensors' buffers: only the strides are used here.
pub fn decode_workspace(
    client: &Client,
    problem: &DecodeProblem,
    q: &TensorBinding,
    tokens: &Tokens,
) -> Result<usize, AttentionError> {
    let plan = Plan::choose(client, problem, q, tokens)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

/// The bytes that [`decode_on`](crate::decode::launch::decode_on) needs, as [`decode_workspace`] counts them.
///
/// # Errors
///
/// As [`decode_workspace`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn decode_workspace_on(
    engine: Engine,
    client: &Client,
    problem: &DecodeProblem,
    q: &TensorBinding,
    tokens: &Tokens,
) -> Result<usize, AttentionError> {
    let plan = Plan::of(engine, client, problem, q, tokens, DecodeTuning::default())?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

impl Plan {
    /// The peak number of bytes in buffers that a step holds at once.
    fn workspace(&self, problem: &DecodeProblem) -> usize {
        let append = &problem.append;
        if append.cache.batch * append.tokens == 0 {
            return 0;
        }
        let (out, lse) = part_shapes(problem, self.parts());
        let kind = match append.cache.storage {
            Storage::Pages { .. } if append.cache.has_scores() => 0,
            // One word is the placeholder for the scores.
            Storage::Pages { .. } => bytes([1]),
            _ => bytes(moves_shape(append)),
        };
        bytes(out) + bytes(lse) + kind
    }
}

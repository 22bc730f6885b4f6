//! What a decode step needs on the device beside its arguments.

use crate::decode::append::moves_shape;
use crate::decode::args::Tokens;
use crate::decode::launch::{DecodeTuning, Plan};
use crate::decode::parts::part_shapes;
use crate::host::engine::Engine;
use crate::host::scratch::bytes;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, DecodeProblem, Storage};

/// The bytes that [`decode`](crate::decode()) or [`decode_pages`](crate::decode::launch::decode_pages) needs on the device beside its
/// arguments, known before it is called: the buffers that it holds at once, each as it is requested. They follow from
/// what the cache has room for, not from what it holds.
///
/// # Errors
///
/// As [`decode`](crate::decode()), but for what concerns the buffers of the tensors, of which only the strides are looked
/// at.
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
/// As [`decode_workspace`]; further [`AttentionError::Unsupported`] if the engine does not serve the problem.
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
    /// The bytes of the buffers that a step holds at once.
    fn workspace(&self, problem: &DecodeProblem) -> usize {
        let append = &problem.append;
        if append.cache.batch * append.tokens == 0 {
            return 0;
        }
        let (out, lse) = part_shapes(problem, self.parts());
        let kind = match append.cache.storage {
            Storage::Pages { .. } if append.cache.has_scores() => 0,
            // A word stands for the scores.
            Storage::Pages { .. } => bytes([1]),
            _ => bytes(moves_shape(append)),
        };
        bytes(out) + bytes(lse) + kind
    }
}

//! The backward pass.
use crate::{Gradients, Inputs, Saved};
use cubecl::client::Client;
use flash_dma_problem::{AttentionError, Problem};

/// Backward.
pub fn backward(
    _client: &Client,
    _problem: &Problem,
    _inputs: Inputs,
    _saved: Saved,
    _grads: Gradients,
) -> Result<(), AttentionError> {
    todo!()
}

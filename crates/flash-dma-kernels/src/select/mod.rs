//! Scores to intervals.
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::AttentionError;

/// Scores `[batch, kv_heads, k_len]` (f32, last axis contiguous) to intervals.
pub fn select(
    _client: &Client,
    _scores: TensorBinding,
    _window: usize,
    _intervals: TensorBinding,
) -> Result<(), AttentionError> {
    todo!()
}

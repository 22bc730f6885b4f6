//! Appending to a cache, and attention over it.

use super::attention::DynamicMaskOps;
use crate::types::{
    ChunkKeys, DecodedPages, DecodedSlots, PageMap, PageTensors, SlotTensors, TokenTensors,
};
#[cfg(feature = "fusion")]
use crate::types::{
    ChunkKeysMetadata, DecodedPagesMetadata, DecodedSlotsMetadata, OptionalFloatMetadata,
    SlotTensorsMetadata,
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{TensorMetadata, backend_extension};
use burn::tensor::TensorData;
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use flash_dma_problem::{AppendProblem, DecodeProblem};

/// Appending to a cache and attention over it.
///
/// Most users want [`DynamicMaskCache`](crate::cache::DynamicMaskCache) and [`PagedCache`](crate::cache::PagedCache),
/// which validate; these operations rely on it. They take and return a cache: an engine writes unshared tensors in
/// place. For inference only: autodiff does not implement them, and its tensors are refused.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait CacheOps: DynamicMaskOps {
    /// The slots with those old keys and tokens that the cache's rule keeps at the last position.
    #[fusion(meta = |slots, _tokens, _problem| slots.clone())]
    fn cache_append_slots(
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> SlotTensors<Self>;

    /// One step of up to [`MAX_DECODE_TOKENS`](flash_dma_problem::MAX_DECODE_TOKENS) tokens: query `t` attends over
    /// the slots as they would be after appending the tokens up to and including `t` one at a time. Returns the slots
    /// with the tokens in them, or unchanged if the problem appends [later](flash_dma_problem::Appending).
    #[fusion(meta = |q, slots, _tokens, problem| DecodedSlotsMetadata {
        out: q.clone(),
        lse: lse(problem),
        slots: slots.clone(),
    })]
    fn cache_decode_slots(
        q: FloatTensor<Self>,
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: DecodeProblem,
    ) -> DecodedSlots<Self>;

    /// Keys that the tokens of a chunk may attend to, in order of position. Selection by their rank, under the rule
    /// without its sinks, and causal attention over them equal one pass over all tokens received.
    #[fusion(meta = |slots, _tokens, problem| chunk_keys(slots, problem))]
    fn cache_chunk_keys(
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> ChunkKeys<Self>;

    /// The pages with the tokens appended to each sequence.
    #[fusion(meta = |pages, _tokens, _map, _problem| pages.clone())]
    fn cache_append_pages(
        #[extension_type] pages: PageTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        map: PageMap,
        problem: AppendProblem,
    ) -> PageTensors<Self>;

    /// One step of up to [`MAX_DECODE_TOKENS`](flash_dma_problem::MAX_DECODE_TOKENS) tokens, each attending over all
    /// tokens up to itself. Returns the pages with the tokens in them, or unchanged if the problem appends
    /// [later](flash_dma_problem::Appending).
    #[fusion(meta = |q, pages, _tokens, _map, problem| DecodedPagesMetadata {
        out: q.clone(),
        lse: lse(problem),
        pages: pages.clone(),
    })]
    fn cache_decode_pages(
        q: FloatTensor<Self>,
        #[extension_type] pages: PageTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        map: PageMap,
        problem: DecodeProblem,
    ) -> DecodedPages<Self>;

    /// Replaces the elements of an i32 tensor: in the memory of `tokens` where a graph may have recorded it.
    #[fusion(dtype = tokens, shape = tokens)]
    fn cache_overwrite(tokens: IntTensor<Self>, values: Vec<i32>) -> IntTensor<Self> {
        Self::int_from_data(TensorData::new(values, tokens.shape()), &tokens.device())
    }
}

#[cfg(feature = "fusion")]
fn chunk_keys(slots: &SlotTensorsMetadata, problem: &AppendProblem) -> ChunkKeysMetadata {
    let [batch, heads, window, dim] = problem.cache.kv_shape();
    let len = window + problem.tokens;
    let rows = TensorSpec::new([batch, heads, len, dim].into(), slots.k.dtype);
    let scores = TensorSpec::new([batch, heads, len].into(), DType::F32);
    ChunkKeysMetadata {
        k: rows.clone(),
        v: rows,
        rank: match problem.cache.has_sinks() {
            false => OptionalFloatMetadata::None,
            true => OptionalFloatMetadata::Some(scores.clone()),
        },
        scores,
    }
}

#[cfg(feature = "fusion")]
fn lse(problem: &DecodeProblem) -> TensorSpec {
    TensorSpec::new(problem.lse_shape().into(), DType::F32)
}

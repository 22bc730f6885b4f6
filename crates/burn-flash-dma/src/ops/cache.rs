//! The operations of a cache as a backend extension: what an engine implements, below the `Tensor` API.

use super::attention::{DynamicMaskOps, OptionalFloat};
use crate::fallback::cache as fallback;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use flash_dma_problem::{AppendProblem, DecodeProblem};
use std::sync::Arc;

/// The tensors of a cache of slots. The slots of a head are in no order; in an empty one the score is −∞,
/// the position −1, and what its rows hold is never used.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct SlotTensors<B: Backend> {
    /// `[batch, kv_heads, window, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, window, head_dim]`.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, window]`, f32.
    pub score: FloatTensor<B>,
    /// `[batch, kv_heads, window]`, i32: where in its sequence a key is.
    pub position: IntTensor<B>,
    /// `[batch]`, i32: the tokens that each sequence has been given.
    pub seen: IntTensor<B>,
}

/// The tensors of a cache of pages.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PageTensors<B: Backend> {
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub v: FloatTensor<B>,
    /// `[pages, kv_heads, page_len]`, f32; present exactly if the keys have scores.
    #[extension_type]
    pub scores: OptionalFloat<B>,
    /// `[batch, max_pages]`, i32: the pages of each sequence in order.
    pub table: IntTensor<B>,
    /// `[batch]`, i32: the tokens that each sequence holds.
    pub lengths: IntTensor<B>,
}

/// What the host knows of pages: the same as their `table` and `lengths`.
#[derive(Clone, Debug)]
pub struct PageMap {
    /// The pages of each sequence in order, those of the new tokens included.
    pub table: Arc<Vec<Vec<i32>>>,
    /// The tokens that each sequence held before the call.
    pub lengths: Vec<usize>,
}

/// New tokens of every sequence.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct TokenTensors<B: Backend> {
    /// `[batch, kv_heads, tokens, head_dim]`, the element type of the cache.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, tokens, head_dim]`, the element type of the cache.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, tokens]`, f32; present exactly if the cache has scores.
    #[extension_type]
    pub scores: OptionalFloat<B>,
}

/// Keys in order of position: those of the slots, the empty ones first, and the new tokens behind them.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct ChunkKeys<B: Backend> {
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, window + tokens]`, f32; −∞ in an empty slot.
    pub scores: FloatTensor<B>,
}

/// What a decode step over slots gives.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct DecodedSlots<B: Backend> {
    /// `[batch, q_heads, tokens, head_dim]`.
    pub out: FloatTensor<B>,
    /// `[batch, q_heads, tokens]`, f32.
    pub lse: FloatTensor<B>,
    /// The cache with the tokens in it.
    #[extension_type]
    pub slots: SlotTensors<B>,
}

/// What a decode step over pages gives.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct DecodedPages<B: Backend> {
    /// `[batch, q_heads, tokens, head_dim]`.
    pub out: FloatTensor<B>,
    /// `[batch, q_heads, tokens]`, f32.
    pub lse: FloatTensor<B>,
    /// The cache with the tokens in it.
    #[extension_type]
    pub pages: PageTensors<B>,
}

/// Appending to a cache and attention over it.
///
/// Most users want [`DynamicMaskCache`](crate::cache::DynamicMaskCache) and [`PagedCache`](crate::cache::PagedCache),
/// which validate; these operations rely on it. A cache goes in and comes out: an engine that finds its
/// tensors unshared writes them in place and returns them. For inference only: no implementation for
/// autodiff, tensors must be without.
///
/// The default bodies are plain Burn operations: exact to the same contract on any backend, but each copies
/// the cache, sorts, and may wait for the device.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait CacheOps: DynamicMaskOps {
    /// The slots with the `window` best keys of those they held and the tokens.
    #[fusion(meta = append_slots_meta)]
    fn cache_append_slots(
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> SlotTensors<Self> {
        fallback::append_slots::<Self>(slots, tokens, problem)
    }

    /// One step of up to [`MAX_DECODE_TOKENS`](flash_dma_problem::MAX_DECODE_TOKENS) tokens: query `t` attends
    /// over what the slots would hold if the tokens up to and with `t` were appended one at a time.
    #[fusion(meta = decode_slots_meta)]
    fn cache_decode_slots(
        q: FloatTensor<Self>,
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: DecodeProblem,
    ) -> DecodedSlots<Self> {
        fallback::decode_slots::<Self>(q, slots, tokens, problem)
    }

    /// The keys that the tokens of a chunk may attend to, in order of position: selection and causal
    /// attention over them equal one pass over everything before.
    #[fusion(meta = chunk_keys_meta)]
    fn cache_chunk_keys(
        #[extension_type] slots: SlotTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> ChunkKeys<Self> {
        fallback::chunk_keys::<Self>(slots, tokens, problem)
    }

    /// The pages with the tokens behind those of each sequence.
    #[fusion(meta = append_pages_meta)]
    fn cache_append_pages(
        #[extension_type] pages: PageTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        map: PageMap,
        problem: AppendProblem,
    ) -> PageTensors<Self> {
        fallback::append_pages::<Self>(pages, tokens, map, problem)
    }

    /// One step of up to [`MAX_DECODE_TOKENS`](flash_dma_problem::MAX_DECODE_TOKENS) tokens, each attending over
    /// everything up to itself.
    #[fusion(meta = decode_pages_meta)]
    fn cache_decode_pages(
        q: FloatTensor<Self>,
        #[extension_type] pages: PageTensors<Self>,
        #[extension_type] tokens: TokenTensors<Self>,
        map: PageMap,
        problem: DecodeProblem,
    ) -> DecodedPages<Self> {
        fallback::decode_pages::<Self>(q, pages, tokens, map, problem)
    }
}

#[cfg(feature = "fusion")]
mod meta {
    use super::*;

    pub(super) fn append_slots_meta(
        slots: &SlotTensorsMetadata,
        _tokens: &TokenTensorsMetadata,
        _problem: &AppendProblem,
    ) -> SlotTensorsMetadata {
        slots.clone()
    }

    pub(super) fn decode_slots_meta(
        q: &TensorSpec,
        slots: &SlotTensorsMetadata,
        _tokens: &TokenTensorsMetadata,
        problem: &DecodeProblem,
    ) -> DecodedSlotsMetadata {
        DecodedSlotsMetadata {
            out: q.clone(),
            lse: lse(problem),
            slots: slots.clone(),
        }
    }

    pub(super) fn chunk_keys_meta(
        slots: &SlotTensorsMetadata,
        _tokens: &TokenTensorsMetadata,
        problem: &AppendProblem,
    ) -> ChunkKeysMetadata {
        let [batch, heads, window, dim] = problem.cache.kv_shape();
        let len = window + problem.tokens;
        let rows = TensorSpec::new([batch, heads, len, dim].into(), slots.k.dtype);
        ChunkKeysMetadata {
            k: rows.clone(),
            v: rows,
            scores: TensorSpec::new([batch, heads, len].into(), DType::F32),
        }
    }

    pub(super) fn append_pages_meta(
        pages: &PageTensorsMetadata,
        _tokens: &TokenTensorsMetadata,
        _map: &PageMap,
        _problem: &AppendProblem,
    ) -> PageTensorsMetadata {
        pages.clone()
    }

    pub(super) fn decode_pages_meta(
        q: &TensorSpec,
        pages: &PageTensorsMetadata,
        _tokens: &TokenTensorsMetadata,
        _map: &PageMap,
        problem: &DecodeProblem,
    ) -> DecodedPagesMetadata {
        DecodedPagesMetadata {
            out: q.clone(),
            lse: lse(problem),
            pages: pages.clone(),
        }
    }

    fn lse(problem: &DecodeProblem) -> TensorSpec {
        TensorSpec::new(problem.lse_shape().into(), DType::F32)
    }
}

#[cfg(feature = "fusion")]
use meta::{
    append_pages_meta, append_slots_meta, chunk_keys_meta, decode_pages_meta, decode_slots_meta,
};

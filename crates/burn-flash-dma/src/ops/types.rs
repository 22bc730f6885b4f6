//! Structures that the operations take and return, besides plain tensors.
// Applies to the derived enums too: a call has one, and nothing boxed crosses the dispatch boundary.
#![allow(clippy::large_enum_variant)]

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use std::sync::Arc;

/// The keys that are attended, and the scores that weight them.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum Selection<B: Backend> {
    /// Plain attention: no score is added and every visible key is attended.
    All,
    /// Every logit gets its key's score; a key is attended inside its interval.
    Scored {
        /// `[batch, kv_heads, k_len]`, f32.
        scores: FloatTensor<B>,
        /// `[batch, kv_heads, k_len, 2]`, i32, made from the scores by
        /// [`DynamicMaskOps::dynamic_mask_select`](crate::ops::DynamicMaskOps::dynamic_mask_select).
        intervals: IntTensor<B>,
        /// Present if a tensor that ranks the keys has a gradient; only the backward pass reads them.
        #[extension_type]
        runners_up: RunnersUp<B>,
    },
}

/// A tensor that may be absent (an `Option` of a tensor cannot cross the dispatch boundary).
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalFloat<B: Backend> {
    /// Absent.
    None,
    /// Present.
    Some(FloatTensor<B>),
}

impl<B: Backend> OptionalFloat<B> {
    pub(crate) fn from_option(tensor: Option<FloatTensor<B>>) -> Self {
        match tensor {
            None => Self::None,
            Some(tensor) => Self::Some(tensor),
        }
    }

    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::None => None,
            Self::Some(tensor) => Some(tensor),
        }
    }

    #[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
    pub(crate) fn as_option(&self) -> Option<&FloatTensor<B>> {
        match self {
            Self::None => None,
            Self::Some(tensor) => Some(tensor),
        }
    }

    /// Applies `f`, possibly to another backend.
    #[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
    pub(crate) fn map<T: Backend>(
        self,
        f: impl FnOnce(FloatTensor<B>) -> FloatTensor<T>,
    ) -> OptionalFloat<T> {
        OptionalFloat::from_option(self.into_option().map(f))
    }
}

/// Parts of one tensor, `[batch, heads, len, head_dim]` each.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PackedRows<B: Backend> {
    /// Present exactly if there are three parts.
    #[extension_type]
    pub q: OptionalFloat<B>,
    /// The last part but one.
    pub k: FloatTensor<B>,
    /// The last part.
    pub v: FloatTensor<B>,
}

impl<B: Backend> PackedRows<B> {
    pub(crate) fn from_parts(mut parts: Vec<FloatTensor<B>>) -> Self {
        let mut last = || parts.pop().expect("two or three parts");
        let (v, k) = (last(), last());
        Self {
            q: OptionalFloat::from_option(parts.pop()),
            k,
            v,
        }
    }

    pub(crate) fn into_parts(self) -> Vec<FloatTensor<B>> {
        let q = self.q.into_option();
        q.into_iter().chain([self.k, self.v]).collect()
    }
}

/// Runners-up, the keys that just missed the window, and the learning of the tensor that ranks the keys.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum RunnersUp<B: Backend> {
    /// None: only the scores of attended keys have a gradient.
    None,
    /// Runners-up whose gradient goes to the tensor that ranks the keys. If `far` is nowhere after the end of an
    /// interval, there are none.
    Some {
        /// `[batch, kv_heads, k_len]`, i32: one past the last position at which each key is a runner-up, which begins
        /// at the end of its interval.
        far: IntTensor<B>,
        /// Most keys of a head that one position would attend to if the intervals ended there: the window and its
        /// runners-up. The kernels size their memory by it.
        max_live: usize,
        /// `[batch, kv_heads, k_len]`, f32: the tensor that ranks the keys, the scores or another one. Nothing reads
        /// its values; autodiff gives it the gradient.
        rank: FloatTensor<B>,
        /// Kept keys that learn from their worth.
        #[extension_type]
        left_out: LeftOut<B>,
    },
}

/// Kept keys that learn from their worth.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum LeftOut<B: Backend> {
    /// None.
    None,
    /// Keys that their rank keeps.
    Some {
        /// `[batch, kv_heads, k_len]`, i32: the first position at which its rank keeps a key, not before the key
        /// itself; none if it is at or after the end of its interval.
        from: IntTensor<B>,
    },
}

impl<B: Backend> LeftOut<B> {
    pub(crate) fn from_option(from: Option<IntTensor<B>>) -> Self {
        match from {
            None => Self::None,
            Some(from) => Self::Some { from },
        }
    }

    #[cfg(any(feature = "cube", feature = "flex"))]
    pub(crate) fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::None => None,
            Self::Some { from } => Some(from),
        }
    }
}

/// Results of the forward pass that the backward pass needs.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Forwarded<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub out: FloatTensor<B>,
    /// Rounding error of a 16-bit `out`, itself in 16 bits and in the shape of `out`. Present exactly if `out` has 16
    /// bits.
    #[extension_type]
    pub residual: OptionalFloat<B>,
    /// `[batch, q_heads, q_len]`, f32.
    pub lse: FloatTensor<B>,
    /// Rounding error of `lse`, in its shape; 0 where it is not finite.
    pub lse_rest: FloatTensor<B>,
}

/// Results of the forward pass that the backward pass needs, and the incoming gradients.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Saved<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub out: FloatTensor<B>,
    /// See [`Forwarded::residual`]; absent means zero. Then the gradients of logits, and so of scores and biases,
    /// contain the rounding of `out`, which adds up over the queries of a key.
    #[extension_type]
    pub residual: OptionalFloat<B>,
    /// `[batch, q_heads, q_len]`, f32.
    pub lse: FloatTensor<B>,
    /// See [`Forwarded::lse_rest`]; absent means zero. Then every probability contains the rounding of `lse`, a
    /// factor of up to `exp(ulp(lse) / 2)`, which is 1.00003 at 1000 and 8e13 at 1e9.
    #[extension_type]
    pub lse_rest: OptionalFloat<B>,
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub grad_out: FloatTensor<B>,
    /// `[batch, q_heads, q_len]`, f32; absent means zero.
    #[extension_type]
    pub grad_lse: OptionalFloat<B>,
}

/// The gradients of the inputs of dynamic-mask attention.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionGrads<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, k_len, head_dim]`, the element type of `q`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, k_len, head_dim]`, the element type of `q`.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, k_len]`, f32; present exactly if the selection has scores.
    #[extension_type]
    pub scores: OptionalFloat<B>,
    /// `[batch, kv_heads, k_len]`, f32: gradient of the tensor that ranks the keys; present exactly if the selection
    /// has one.
    #[extension_type]
    pub rank: OptionalFloat<B>,
}

/// A mask as a tile plan: see [`PlanGeometry`](crate::PlanGeometry) for both layouts.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PlanTensors<B: Backend> {
    /// `[batch, heads, key_blocks, queries, 2]`, i32: one bit per pair.
    pub bits: IntTensor<B>,
    /// `[batch, heads, query_blocks, key_blocks]`, i32: the visible pairs of each block.
    pub counts: IntTensor<B>,
}

/// Keys that a mask shows to each query, before causal masking.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalPlan<B: Backend> {
    /// All keys.
    None,
    /// The keys of a mask.
    Some {
        /// See [`PlanTensors::bits`].
        bits: IntTensor<B>,
        /// See [`PlanTensors::counts`].
        counts: IntTensor<B>,
    },
}

/// The mask and the bias of a call.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Masking<B: Backend> {
    /// Present exactly if the problem has a plan.
    #[extension_type]
    pub plan: OptionalPlan<B>,
    /// f32, f16 or bf16, in the shape that the problem says; present exactly if it has a bias.
    #[extension_type]
    pub bias: OptionalFloat<B>,
}

/// The gradients of the inputs of attention under a mask and a bias.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct MaskedGrads<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, k_len, head_dim]`, the element type of `q`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, k_len, head_dim]`, the element type of `q`.
    pub v: FloatTensor<B>,
    /// f32, in the bias's own shape; present exactly if it was requested.
    #[extension_type]
    pub bias: OptionalFloat<B>,
}

/// Tensors of a cache of slots. The slots of a head are in no order; an empty one has score −∞ and position −1. A
/// recent token of score −∞ also has a slot, which counts as empty once it is no longer recent. The rows of a slot of
/// score −∞ are never used.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct SlotTensors<B: Backend> {
    /// `[batch, kv_heads, window, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, window, head_dim]`.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, window]`, f32.
    pub score: FloatTensor<B>,
    /// `[batch, kv_heads, window]`, i32: the position of the key in its sequence.
    pub position: IntTensor<B>,
    /// `[batch]`, i32: number of tokens each sequence has received.
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
    /// `[batch]`, i32: number of tokens each sequence holds.
    pub lengths: IntTensor<B>,
}

/// Host's copy of the `table` and `lengths` of pages.
#[derive(Clone, Debug)]
pub struct PageMap {
    /// Pages of each sequence in order, including those of the new tokens. Sequences may share a page that no new
    /// token is written to.
    pub table: Arc<Vec<Vec<i32>>>,
    /// Number of tokens each sequence held before the call.
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

/// Keys in order of position: those of the slots, empty ones first, then the new tokens.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct ChunkKeys<B: Backend> {
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub v: FloatTensor<B>,
    /// `[batch, kv_heads, window + tokens]`, f32; −∞ in an empty slot.
    pub scores: FloatTensor<B>,
    /// `[batch, kv_heads, window + tokens]`, f32: ranks the keys, +∞ for a visible sink. Present exactly if the
    /// cache's rule has sinks; otherwise the scores rank.
    #[extension_type]
    pub rank: OptionalFloat<B>,
}

/// The results of a decode step over slots.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct DecodedSlots<B: Backend> {
    /// `[batch, q_heads, tokens, head_dim]`.
    pub out: FloatTensor<B>,
    /// `[batch, q_heads, tokens]`, f32.
    pub lse: FloatTensor<B>,
    /// The cache with the tokens in it, unless they are appended later.
    #[extension_type]
    pub slots: SlotTensors<B>,
}

/// The results of a decode step over pages.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct DecodedPages<B: Backend> {
    /// `[batch, q_heads, tokens, head_dim]`.
    pub out: FloatTensor<B>,
    /// `[batch, q_heads, tokens]`, f32.
    pub lse: FloatTensor<B>,
    /// The cache with the tokens in it, unless they are appended later.
    #[extension_type]
    pub pages: PageTensors<B>,
}

/// The inputs of a norm that its backward pass needs.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum Normed<B: Backend> {
    /// No norm.
    None,
    /// A norm.
    Some {
        /// `[batch, len, heads, head_dim]`, the element type of `gamma`.
        x: FloatTensor<B>,
        /// `[head_dim]`.
        gamma: FloatTensor<B>,
    },
}

/// The gradients of heads that are normalised and rotated.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct NormGrads<B: Backend> {
    /// `[batch, len, heads, head_dim]`, the element type of `x`.
    pub x: FloatTensor<B>,
    /// `[head_dim]`, the element type of `x`; present exactly if there is a norm.
    #[extension_type]
    pub gamma: OptionalFloat<B>,
}

//! The structures that the operations take and return next to plain tensors.
// The derived enums are meant, too: a call has one, and nothing boxed crosses the dispatch boundary.
#![allow(clippy::large_enum_variant)]

mod list;
mod packed;

pub use list::FloatList;
pub use packed::PackedRows;
#[cfg(feature = "fusion")]
pub(crate) use packed::PackedRowsMetadata;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use flash_dma_problem::tensors;
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
        /// `[batch, kv_heads, k_len, 2]`, i32: what
        /// [`DynamicMaskOps::dynamic_mask_select`](crate::ops::DynamicMaskOps::dynamic_mask_select) made of the scores.
        intervals: IntTensor<B>,
        /// Present if a tensor that ranks the keys has a gradient; only the backward pass reads it.
        #[extension_type]
        learning: RankLearning<B>,
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

    /// The tensor after `f`, perhaps of another backend.
    #[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
    pub(crate) fn map<T: Backend>(
        self,
        f: impl FnOnce(FloatTensor<B>) -> FloatTensor<T>,
    ) -> OptionalFloat<T> {
        OptionalFloat::from_option(self.into_option().map(f))
    }
}

impl<B: Backend> Selection<B> {
    /// The tensors that an engine reads: those of the keys, if they have scores.
    #[cfg(any(feature = "cube", feature = "flex"))]
    pub(crate) fn into_tensors(self) -> Option<tensors::Selection<FloatTensor<B>, IntTensor<B>>> {
        match self {
            Self::All => None,
            Self::Scored {
                scores,
                intervals,
                learning,
            } => Some(tensors::Selection {
                scores,
                intervals,
                learning: learning.into_parts().map(|(learning, _)| learning),
            }),
        }
    }
}

/// The pairs by which a tensor that ranks the keys learns; see [`tensors::RankLearning`], whose tensors are i32 here.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum RankLearning<B: Backend> {
    /// None: only the scores of attended keys have a gradient.
    None,
    /// Some, whose gradient is that of the tensor that ranks the keys.
    Some {
        /// See [`tensors::RankLearning::ends`].
        ends: IntTensor<B>,
        /// See [`tensors::RankLearning::max_live`].
        max_live: usize,
        /// See [`tensors::RankLearning::kept_from`].
        #[extension_type]
        kept_from: OptionalInt<B>,
        /// `[batch, kv_heads, k_len]`, f32: the tensor that ranks the keys, the scores or another one. Nothing reads
        /// its values; autodiff gives it the gradient.
        rank: FloatTensor<B>,
    },
}

impl<B: Backend> RankLearning<B> {
    /// Of the pairs and the tensor that ranks the keys.
    pub(crate) fn from_parts(
        parts: Option<(tensors::RankLearning<IntTensor<B>>, FloatTensor<B>)>,
    ) -> Self {
        parts.map_or(Self::None, |(learning, rank)| Self::Some {
            ends: learning.ends,
            max_live: learning.max_live,
            kept_from: (learning.kept_from).map_or(OptionalInt::None, OptionalInt::Some),
            rank,
        })
    }

    /// The pairs and the tensor that ranks the keys.
    #[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
    pub(crate) fn into_parts(
        self,
    ) -> Option<(tensors::RankLearning<IntTensor<B>>, FloatTensor<B>)> {
        match self {
            Self::None => None,
            Self::Some {
                ends,
                max_live,
                kept_from,
                rank,
            } => {
                let kept_from = match kept_from {
                    OptionalInt::None => None,
                    OptionalInt::Some(from) => Some(from),
                };
                let learning = tensors::RankLearning {
                    ends,
                    max_live,
                    kept_from,
                };
                Some((learning, rank))
            }
        }
    }
}

/// A tensor of integers that may be absent, see [`OptionalFloat`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalInt<B: Backend> {
    /// Absent.
    None,
    /// Present.
    Some(IntTensor<B>),
}

/// The results that are wanted of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// `out` and `lse`. Under autodiff `lse` is a constant.
    Out,
    /// `out` and `lse`, which is differentiable under autodiff.
    OutAndLse,
    /// All that a backward pass needs. Autodiff wants it of the backend below; under autodiff itself every result is a
    /// constant.
    Saved,
}

/// The results of a forward pass.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Forwarded<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`, in any memory layout.
    pub out: FloatTensor<B>,
    /// See [`tensors::Outputs::residual`]; present exactly if it is [wanted](Wanted::Saved) and `out` has 16 bits.
    #[extension_type]
    pub residual: OptionalFloat<B>,
    /// `[batch, q_heads, q_len]`, f32.
    pub lse: FloatTensor<B>,
    /// See [`tensors::Outputs::lse_rest`]; present exactly if it is [wanted](Wanted::Saved).
    #[extension_type]
    pub lse_rest: OptionalFloat<B>,
}

#[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
impl<B: Backend> Forwarded<B> {
    pub(crate) fn from_tensors(outputs: tensors::Outputs<FloatTensor<B>>) -> Self {
        Self {
            out: outputs.out,
            residual: OptionalFloat::from_option(outputs.residual),
            lse: outputs.lse,
            lse_rest: OptionalFloat::from_option(outputs.lse_rest),
        }
    }

    #[cfg(feature = "autodiff")]
    pub(crate) fn into_tensors(self) -> tensors::Outputs<FloatTensor<B>> {
        tensors::Outputs {
            out: self.out,
            residual: self.residual.into_option(),
            lse: self.lse,
            lse_rest: self.lse_rest.into_option(),
        }
    }
}

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Saved<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub out: FloatTensor<B>,
    /// See [`tensors::Saved::residual`].
    #[extension_type]
    pub residual: OptionalFloat<B>,
    /// `[batch, q_heads, q_len]`, f32.
    pub lse: FloatTensor<B>,
    /// See [`tensors::Saved::lse_rest`].
    #[extension_type]
    pub lse_rest: OptionalFloat<B>,
    /// `[batch, q_heads, q_len, head_dim]`, the element type of `q`.
    pub grad_out: FloatTensor<B>,
    /// `[batch, q_heads, q_len]`, f32; absent means zero.
    #[extension_type]
    pub grad_lse: OptionalFloat<B>,
}

#[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
impl<B: Backend> Saved<B> {
    #[cfg(feature = "autodiff")]
    pub(crate) fn from_tensors(saved: tensors::Saved<FloatTensor<B>>) -> Self {
        Self {
            out: saved.out,
            residual: OptionalFloat::from_option(saved.residual),
            lse: saved.lse,
            lse_rest: OptionalFloat::from_option(saved.lse_rest),
            grad_out: saved.grad_out,
            grad_lse: OptionalFloat::from_option(saved.grad_lse),
        }
    }

    pub(crate) fn into_tensors(self) -> tensors::Saved<FloatTensor<B>> {
        tensors::Saved {
            out: self.out,
            residual: self.residual.into_option(),
            lse: self.lse,
            lse_rest: self.lse_rest.into_option(),
            grad_out: self.grad_out,
            grad_lse: self.grad_lse.into_option(),
        }
    }
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
    /// `[batch, kv_heads, k_len]`, f32; present exactly if the problem has scores that learn.
    #[extension_type]
    pub scores: OptionalFloat<B>,
    /// `[batch, kv_heads, k_len]`, f32: the gradient of the tensor that ranks the keys; present exactly if the
    /// selection has a tensor that does.
    #[extension_type]
    pub rank: OptionalFloat<B>,
}

#[cfg(any(feature = "autodiff", feature = "cube", feature = "flex"))]
impl<B: Backend> AttentionGrads<B> {
    pub(crate) fn from_tensors(grads: tensors::Gradients<FloatTensor<B>>) -> Self {
        Self {
            q: grads.q,
            k: grads.k,
            v: grads.v,
            scores: OptionalFloat::from_option(grads.scores),
            rank: OptionalFloat::from_option(grads.rank),
        }
    }

    #[cfg(feature = "autodiff")]
    pub(crate) fn into_tensors(self) -> tensors::Gradients<FloatTensor<B>> {
        tensors::Gradients {
            q: self.q,
            k: self.k,
            v: self.v,
            scores: self.scores.into_option(),
            rank: self.rank.into_option(),
        }
    }
}

/// A mask, cut into tiles: see [`PlanGeometry`](crate::PlanGeometry) for both layouts.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PlanTensors<B: Backend> {
    /// `[batch, heads, key_blocks, queries, 2]`, i32: one bit per pair.
    pub bits: IntTensor<B>,
    /// `[batch, heads, query_blocks, key_blocks]`, i32: the visible pairs of each block.
    pub counts: IntTensor<B>,
}

/// The keys that a mask shows to each query, before causal masking.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalPlan<B: Backend> {
    /// All keys.
    None,
    /// The keys of a mask.
    Some {
        /// As [`PlanTensors::bits`].
        bits: IntTensor<B>,
        /// As [`PlanTensors::counts`].
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

/// The tensors of a cache of slots. The slots of a head are in no order; an empty one has the score −∞ and the position
/// −1. A recent token of score −∞ has a slot, too, which counts as empty once it is no longer recent. The rows of a
/// slot of score −∞ are never used.
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
    /// `[batch]`, i32: the number of tokens that each sequence has been given.
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
    /// `[batch]`, i32: the number of tokens that each sequence holds.
    pub lengths: IntTensor<B>,
}

/// The host's copy of the `table` and `lengths` of pages.
#[derive(Clone, Debug)]
pub struct PageMap {
    /// The pages of each sequence in order, those of the new tokens included. Several sequences may have a page that no
    /// new token is written to.
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
    /// `[batch, kv_heads, window + tokens]`, f32: what ranks the keys, +∞ for a sink that is shown. Present exactly if
    /// the cache's rule has sinks; otherwise the scores rank.
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
    /// There is no norm.
    None,
    /// There is one.
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

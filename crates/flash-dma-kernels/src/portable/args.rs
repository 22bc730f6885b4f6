//! The launch arguments of the portable kernels.

use crate::alibi::AlibiArg;
use crate::args::Scaling;
use crate::dropout::DropoutArg;
use cubecl::prelude::*;

/// Q, K and V, each `[batch, heads, len, head_dim]`, any strides with a contiguous last axis.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, N: Size> {
    pub q: OwnedTensor<Vector<F, N>>,
    pub k: OwnedTensor<Vector<F, N>>,
    pub v: OwnedTensor<Vector<F, N>>,
}

/// The saved numbers of every query row in the backward pass.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedRows<F: Float, N: Size> {
    /// The output gradient, strides as of Q.
    pub grad_out: OwnedTensor<Vector<F, N>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: OwnedTensor<f32>,
    /// The rounding errors of `lse`, in its layout.
    pub lse_rest: OwnedTensor<f32>,
    /// The row sums, contiguous `[batch, q_heads, q_len]`.
    pub delta: OwnedTensor<f32>,
}

/// The gradients of a key tile, contiguous; the keys that the kernel visits are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyGradients<F: Float, N: Size> {
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: OwnedTensor<Vector<F, N>>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: OwnedTensor<Vector<F, N>>,
    /// `[batch, kv_heads, k_len]`; given exactly if the keys have intervals, and thus scores.
    pub scores: ComptimeOption<OwnedTensor<f32>>,
}

/// The keys that queries may attend to: the variant of the blueprint's
/// [`Pattern`](crate::pattern::kind::Pattern). Keys with intervals come as `I`, [`ListedIntervals`] for query tiles and
/// [`OrderedIntervals`] for key tiles.
#[expect(
    dead_code,
    reason = "launches and kernels make the types that CubeCL derives"
)]
#[derive(CubeType, CubeLaunch)]
pub(crate) enum Keys<I: LaunchArg> {
    All,
    Intervals(I),
    Planned(TilePlan),
}

/// Keys with intervals as query tiles read them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ListedIntervals {
    /// `[batch, kv_heads, k_len]`, any strides.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len, 2]`.
    pub intervals: OwnedTensor<u32>,
    /// Key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists).
    pub list: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// Keys with intervals as key tiles own them, see [`OrderedKeys`](crate::pattern::intervals::order::OrderedKeys).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct OrderedIntervals {
    /// `[batch, kv_heads, k_len]`, any strides.
    pub scores: OwnedTensor<f32>,
    pub keys: OwnedTensor<u32>,
    pub ends: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// The keys whose ranks learn as key tiles own them, see [`RankedKeys`](crate::pattern::intervals::ranked::RankedKeys).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankedList {
    /// `[batch, kv_heads, k_len]`, any strides.
    pub scores: OwnedTensor<f32>,
    pub keys: OwnedTensor<u32>,
    /// Contiguous `[batch, kv_heads, k_len, 2]`.
    pub spans: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// A mask as a tile plan, see [`PlanGeometry`](flash_dma_problem::PlanGeometry).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TilePlan {
    pub bits: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// A bias that broadcasts to the logits, any strides; given exactly if the blueprint's pattern has a bias per pair.
pub(crate) type PairBiasArg = ComptimeOption<OwnedTensor<f32>>;

/// All that stands between the product of a query and a key and its weight.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LogitTerms {
    pub bias: PairBiasArg,
    /// The slopes, `[q_heads]`, if there is ALiBi.
    pub alibi: AlibiArg,
    /// Seed and rate of the mask, if there is dropout.
    pub dropout: DropoutArg,
    /// Scale and softcap.
    pub scaling: Scaling,
}

/// The outputs of the forward kernel, overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Outputs<F: Float, N: Size> {
    /// `[batch, q_heads, q_len, head_dim]` without gaps, in either order of heads and queries.
    pub out: OwnedTensor<Vector<F, N>>,
    /// As `out`: the part of it that rounding loses.
    pub residual: ComptimeOption<OwnedTensor<Vector<F, N>>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: OwnedTensor<f32>,
    /// As `lse`: the part of it that rounding loses.
    pub lse_rest: ComptimeOption<OwnedTensor<f32>>,
}

/// The lengths and heads of a problem.
#[derive(CubeType, Clone, Copy)]
pub struct Sizes {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub k_len: usize,
}

#[cube]
impl Sizes {
    /// The sizes of the problem that a kernel is launched for.
    pub(crate) fn of<F: Float, N: Size>(operands: &Operands<F, N>) -> Sizes {
        Sizes {
            q_heads: operands.q.shape(1),
            kv_heads: operands.k.shape(1),
            q_len: operands.q.shape(2),
            k_len: operands.k.shape(2),
        }
    }

    pub(crate) fn kv_head(&self, head: usize) -> usize {
        head / (self.q_heads / self.kv_heads)
    }
}

//! What the portable kernels are launched with.

use cubecl::prelude::*;

/// Q, K and V, each `[batch, heads, len, head_dim]`, any strides with a contiguous last axis.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, N: Size> {
    pub q: OwnedTensor<Vector<F, N>>,
    pub k: OwnedTensor<Vector<F, N>>,
    pub v: OwnedTensor<Vector<F, N>>,
}

/// What the backward pass knows per query row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedRows<F: Float, N: Size> {
    /// The output gradient, strides as of Q.
    pub grad_out: OwnedTensor<Vector<F, N>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: OwnedTensor<f32>,
    /// The row sums, contiguous `[batch, q_heads, q_len]`.
    pub delta: OwnedTensor<f32>,
}

/// Where the keys of a query tile come from; nothing of it is read without intervals.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeySource {
    /// `[batch, kv_heads, k_len]`, any strides.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len, 2]`.
    pub intervals: OwnedTensor<u32>,
    /// Key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists).
    pub list: OwnedTensor<u32>,
    /// How many keys each list has.
    pub counts: OwnedTensor<u32>,
}

/// Where the keys of a key tile come from, see [`OrderedKeys`](crate::pattern::intervals::order::OrderedKeys); nothing of
/// it is read without intervals.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct OrderedSource {
    /// `[batch, kv_heads, k_len]`, any strides.
    pub scores: OwnedTensor<f32>,
    pub keys: OwnedTensor<u32>,
    pub ends: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// A tile plan, see [`PlanGeometry`](flash_dma_problem::PlanGeometry), and a bias that broadcasts to the logits; each is
/// read only if the pattern has it.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PlanAndBias {
    pub bits: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
    /// Any strides.
    pub bias: OwnedTensor<f32>,
}

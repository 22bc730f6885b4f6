//! What the query-outer kernels of tensor cores are launched with.

use crate::vectors::Chunk;
use cubecl::prelude::*;

/// Q, K and V. The rows of Q are read `NQ` elements at a time.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<E: Float, NQ: Size> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: OwnedTensor<Vector<E, NQ>>,
    /// `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub k: OwnedTensor<Chunk<E>>,
    /// As `k`.
    pub v: OwnedTensor<Chunk<E>>,
}

/// Where the keys of a query tile come from, and their biases. Without intervals, plan and bias nothing of it is read;
/// with a plan or a bias it is what [`mask`](crate::matrix::mask) says.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeySource {
    /// `[batch, kv_heads, k_len]`, last axis contiguous.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of first and end.
    pub intervals: Box<[Vector<u32, Const<2>>]>,
    /// Key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists).
    pub list: OwnedTensor<u32>,
    /// How many keys each list has.
    pub counts: OwnedTensor<u32>,
}

/// What a forward kernel writes. Both are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Outputs<O: Float> {
    /// Contiguous `[batch, q_heads, q_len, head_dim]`.
    pub out: Box<[Vector<O, Const<2>>]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
}

/// What the forward pass left per query row, and the row sums of the backward pass.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedRows {
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub delta: Box<[f32]>,
}

/// The query tiles of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LaunchedTiles {
    /// The first.
    pub first: u32,
    /// Their number, `CUBE_COUNT_X`.
    pub count: u32,
}

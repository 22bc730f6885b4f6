//! What the dk/dv kernels of tensor cores are launched with.

use crate::vectors::Chunk;
use cubecl::prelude::*;

/// The inputs, the output gradient, and what is known per query row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardInputs<E: Float> {
    /// `[batch, q_heads, q_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub q: OwnedTensor<Chunk<E>>,
    /// `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub k: OwnedTensor<Chunk<E>>,
    /// As `k`.
    pub v: OwnedTensor<Chunk<E>>,
    /// As `q`.
    pub grad_out: OwnedTensor<Chunk<E>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub delta: Box<[f32]>,
}

/// Where the keys of a key tile come from, and their biases. Without intervals, plan and bias nothing of it is read; with
/// a plan or a bias it is what [`mask`](crate::backward::dkdv::shared::mask) says.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTileSource {
    /// `[batch, kv_heads, k_len]`, last axis contiguous.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of first and end.
    pub intervals: Box<[Vector<u32, Const<2>>]>,
    /// The keys of each chunk, see [`ChunkKeys`](crate::pattern::intervals::chunks::ChunkKeys).
    pub list: Box<[u32]>,
    /// How many keys each chunk has.
    pub counts: Box<[u32]>,
}

/// The gradients of the keys, which a cube overwrites or, with `bp.shared_keys`, adds to.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyGradients<O: Float> {
    /// Contiguous rows of `head_dim`.
    pub k: Box<[Vector<O, Const<2>>]>,
    /// As `k`.
    pub v: Box<[Vector<O, Const<2>>]>,
    /// One per row of `k`.
    pub scores: Box<[f32]>,
}

/// How the key tiles of a launch are laid out over its cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct KeyGrid {
    /// Queries per chunk.
    pub chunk: u32,
    /// Chunks per kv head.
    pub chunks: u32,
    /// Key tiles per chunk.
    pub tiles: u32,
    /// Entries per list.
    pub capacity: u32,
}

/// The boxes in which `wgmma` copies query tiles.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QueryBoxes<E: Float> {
    pub q: TensorMap<E, Tiled>,
    pub grad_out: TensorMap<E, Tiled>,
    /// LSE and row sums.
    pub rows: TensorMap<f32, Tiled>,
}

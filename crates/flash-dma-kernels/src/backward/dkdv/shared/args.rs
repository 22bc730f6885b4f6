//! What the dk/dv kernels of tensor cores are launched with.

use crate::pattern::tensors::{KeyTensors, SourceTensors};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The inputs, the output gradient, and what is known per query row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardInputs<E: Float> {
    /// `[batch, q_heads, q_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub q: OwnedTensor<Segment<E>>,
    /// `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub k: OwnedTensor<Segment<E>>,
    /// As `k`.
    pub v: OwnedTensor<Segment<E>>,
    /// As `q`.
    pub grad_out: OwnedTensor<Segment<E>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub delta: Box<[f32]>,
}

/// Where the keys of a key tile come from, and what is added to their logits. Without intervals and without a plan
/// every chunk has all keys, in order.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTileSource {
    /// With intervals their scores, `[batch, kv_heads, k_len]`, last axis contiguous. Otherwise the bias: of keys
    /// `[batch | 1, heads, 1, k_len]`, of pairs `[batch | 1, heads, q_len | 1, k_len | 1]`, any strides.
    pub bias: ComptimeOption<OwnedTensor<f32>>,
    /// `bp.pattern.has_intervals()` only.
    pub intervals: ComptimeOption<KeyTileIntervals>,
    /// `bp.pattern.is_planned()` only.
    pub plan: ComptimeOption<KeyTilePlan>,
}

/// Keys on intervals of positions.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTileIntervals {
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of first and end.
    pub ends: Box<[Vector<u32, Const<2>>]>,
    /// The keys of each chunk, see [`ChunkKeys`](crate::pattern::intervals::chunks::ChunkKeys).
    pub list: Box<[u32]>,
    /// How many keys each chunk has.
    pub counts: Box<[u32]>,
}

/// The keys of a tile plan. There is one chunk, of all queries.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTilePlan {
    /// The bits of the plan, a pair of words for a query and a key block.
    pub bits: Box<[Vector<u32, Const<2>>]>,
    /// The steps of each key tile, as `mask::query_lists` writes them.
    pub list: Box<[u32]>,
    /// A header of [`QUERY_LIST_HEADER`](crate::pattern::layout::QUERY_LIST_HEADER) words followed by two words per
    /// list: the number of full steps, which come first, and the number of all steps.
    pub counts: Box<[u32]>,
}

/// The gradients of the keys, which a cube overwrites or, with `bp.shared_keys`, adds to. Even then it overwrites the
/// rows of k and v of a key whose queries are all of its chunk.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyGradients<O: Float> {
    /// Contiguous rows of `head_dim`.
    pub k: Box<[Vector<O, Const<2>>]>,
    /// As `k`.
    pub v: Box<[Vector<O, Const<2>>]>,
    /// Of the scores, or of a bias of keys: one per row of `k`; with `bp.pattern.has_head_bias()` contiguous
    /// `[batch, q_heads, k_len]`, added to.
    pub scores: ComptimeOption<Box<[f32]>>,
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

impl SourceTensors {
    /// The launch argument of kernels that own key tiles.
    pub(crate) fn into_key_tiles(self) -> KeyTileSourceLaunch {
        let (mut intervals, mut plan) = (None, None);
        match self.keys {
            KeyTensors::All => {}
            KeyTensors::Intervals(tensors) => {
                let [ends, list, counts] = tensors.map(TensorBinding::into_buffer_arg);
                intervals = Some(KeyTileIntervalsLaunch::new(ends, list, counts));
            }
            KeyTensors::Planned(tensors) => {
                let [bits, list, counts] = tensors.map(TensorBinding::into_buffer_arg);
                plan = Some(KeyTilePlanLaunch::new(bits, list, counts));
            }
        }
        let bias = self.bias.map(TensorBinding::into_tensor_arg);
        KeyTileSourceLaunch::new(bias.into(), intervals.into(), plan.into())
    }
}

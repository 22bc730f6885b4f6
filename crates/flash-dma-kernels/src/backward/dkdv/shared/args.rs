//! The launch arguments of the tensor-core dk/dv kernels.

use crate::alibi::AlibiArg;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::sums::add_pair;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The inputs, the output gradient, and the preprocessed numbers of every query row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardInputs<E: Float> {
    /// `[batch, q_heads, q_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub q: OwnedTensor<Segment<E>>,
    /// `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub k: OwnedTensor<Segment<E>>,
    /// Like `k`.
    pub v: OwnedTensor<Segment<E>>,
    /// Like `q`.
    pub grad_out: OwnedTensor<Segment<E>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`: the rounding errors of the LSEs.
    pub lse_rest: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub delta: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`: the rows' words of the dropout mask, for `mma`.
    pub words: ComptimeOption<Box<[u32]>>,
    pub slopes: AlibiArg,
}

/// The source of a key tile's keys, and of the numbers that are added to their logits. Without intervals and without a
/// plan every chunk has all keys, in order.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTileSource {
    /// With intervals the keys' scores, `[batch, kv_heads, k_len]`, last axis contiguous. Otherwise the bias: per key
    /// `[batch | 1, heads, 1, k_len]`, per pair `[batch | 1, heads, q_len | 1, k_len | 1]`, any strides.
    pub bias: ComptimeOption<OwnedTensor<f32>>,
    /// `bp.pattern.has_intervals()` only.
    pub intervals: ComptimeOption<KeyTileIntervals>,
    /// `bp.pattern.is_planned()` only.
    pub plan: ComptimeOption<KeyTilePlan>,
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTileIntervals {
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of first and end.
    pub ends: Box<[Vector<u32, Const<2>>]>,
    /// The keys of each chunk, see [`ChunkKeys`](crate::pattern::intervals::chunks::ChunkKeys).
    pub list: Box<[u32]>,
    pub counts: Box<[u32]>,
    /// `bp.kept` only, contiguous `[batch, kv_heads, k_len]`: the first position at which its rank keeps each key.
    pub kept_from: ComptimeOption<Box<[u32]>>,
}

/// The keys of a tile plan. There is one chunk, of all queries.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyTilePlan {
    /// The plan's bits, a pair of words for a query and a key block.
    pub bits: Box<[Vector<u32, Const<2>>]>,
    /// The steps of each key tile, as `mask::query_lists` writes them.
    pub list: Box<[u32]>,
    /// A header of [`QUERY_LIST_HEADER`](crate::pattern::layout::QUERY_LIST_HEADER) words followed by two words per
    /// list: the number of full steps, which come first, and the number of all steps.
    pub counts: Box<[u32]>,
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyGradients<O: Float> {
    pub k: GradientRows<O>,
    pub v: GradientRows<O>,
    /// Gradients of the scores, or of a bias per key, or with `bp.kept` of the rank: one per row of `k`, which a cube
    /// overwrites or, with `bp.shared_keys`, adds to; with `bp.pattern.has_head_bias()` contiguous `[batch, q_heads, k_len]`, added to.
    pub scores: ComptimeOption<Box<[f32]>>,
}

/// The gradients of k or v, in rows of `head_dim`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GradientRows<O: Float> {
    /// Contiguous; a cube overwrites its keys' rows, with `bp.shared_keys` only those whose queries are all in its
    /// chunk.
    own: Box<[Vector<O, Const<2>>]>,
    /// `bp.shared_keys` only: shaped as `own`; cubes add the rows of their other keys.
    sums: ComptimeOption<Box<[Vector<f32, Const<2>>]>>,
}

#[cube]
impl<O: Float> GradientRows<O> {
    /// Writes the pair `at` of a key's row, or adds it if the key is `shared` (with `bp.shared_keys` only).
    pub(crate) fn write(
        &mut self,
        at: usize,
        pair: Vector<f32, Const<2>>,
        shared: bool,
        #[comptime] bp: DkdvBlueprint,
    ) {
        if comptime!(bp.shared_keys) && shared {
            self.add_to_sum(at, pair, bp);
        } else {
            self.own[at] = Vector::cast_from(pair);
        }
    }

    /// Adds to the pair `at` of a key's row, which this unit has written or added to.
    pub(crate) fn add(
        &mut self,
        at: usize,
        pair: Vector<f32, Const<2>>,
        shared: bool,
        #[comptime] bp: DkdvBlueprint,
    ) {
        if comptime!(bp.shared_keys) && shared {
            self.add_to_sum(at, pair, bp);
        } else {
            self.own[at] = Vector::cast_from(Vector::cast_from(self.own[at]) + pair);
        }
    }

    fn add_to_sum(
        &mut self,
        at: usize,
        pair: Vector<f32, Const<2>>,
        #[comptime] bp: DkdvBlueprint,
    ) {
        let sums = self.sums.as_mut().unwrap();
        add_pair(&mut sums[at..at + 1], pair, bp.instruction);
    }
}

/// The layout of a launch's key tiles over its cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct KeyGrid {
    pub chunk: u32,
    pub chunks: u32,
    pub tiles: u32,
    pub capacity: u32,
}

/// The boxes in which `wgmma` copies query tiles.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QueryBoxes<E: Float> {
    pub q: TensorMap<E, Tiled>,
    pub grad_out: TensorMap<E, Tiled>,
    /// `-log2(e)` times the LSEs, and row sums.
    pub rows: TensorMap<f32, Tiled>,
    /// The rows' words of the dropout mask.
    pub words: ComptimeOption<TensorMap<f32, Tiled>>,
}

/// The destination of the gradients of k or v, see [`GradientRows`].
#[derive(Clone, Debug)]
pub(crate) struct GradientTensors {
    pub own: TensorBinding,
    /// f32, for keys to whose gradients several cubes add.
    pub sums: Option<TensorBinding>,
}

impl GradientTensors {
    /// The destination for a kernel whose cubes share no keys.
    pub(crate) fn of(own: &TensorBinding) -> Self {
        Self {
            own: own.clone(),
            sums: None,
        }
    }

    fn into_rows<O: Float>(self) -> GradientRowsLaunch<O> {
        let sums = self.sums.map(TensorBinding::into_buffer_arg);
        GradientRowsLaunch::new(self.own.into_buffer_arg(), sums.into())
    }
}

impl<O: Float> KeyGradientsLaunch<O> {
    /// The launch argument for the gradients of k and v, and of the scores.
    pub(crate) fn of([k, v]: [GradientTensors; 2], scores: Option<TensorBinding>) -> Self {
        let scores = scores.map(TensorBinding::into_buffer_arg);
        Self::new(k.into_rows(), v.into_rows(), scores.into())
    }
}

impl SourceTensors {
    pub(crate) fn into_key_tiles(self) -> KeyTileSourceLaunch {
        let (mut intervals, mut plan) = (None, None);
        match self.keys {
            KeyTensors::All => {}
            KeyTensors::Intervals(tensors) => {
                let [ends, list, counts] = tensors.map(TensorBinding::into_buffer_arg);
                let kept_from = self.kept_from.map(TensorBinding::into_buffer_arg);
                let kept_from = kept_from.into();
                intervals = Some(KeyTileIntervalsLaunch::new(ends, list, counts, kept_from));
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

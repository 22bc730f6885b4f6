//! The launch arguments of the tensor-core kernels that own query tiles.

use crate::alibi::AlibiArg;
use crate::matrix::rows::{OutputRows, RowOrder};
use crate::matrix::softmax::SoftmaxSums;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// Q, K and V. The rows of Q are read `NQ` elements at a time.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<E: Float, NQ: Size> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: OwnedTensor<Vector<E, NQ>>,
    /// `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes.
    pub k: OwnedTensor<Segment<E>>,
    /// Like `k`.
    pub v: OwnedTensor<Segment<E>>,
}

/// The source of a query tile's keys, and of the numbers that are added to their logits. Parts that the kernel's
/// [`Pattern`](crate::pattern::kind::Pattern) lacks are absent: without intervals and plan the tile's queries see all
/// keys.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeySource {
    /// With intervals the keys' scores, `[batch, kv_heads, k_len]`; otherwise a bias: per key
    /// `[batch | 1, heads, 1, k_len]`, per pair of any other shape. The last axis of scores and of a bias per key is
    /// contiguous.
    pub bias: ComptimeOption<OwnedTensor<f32>>,
    pub intervals: ComptimeOption<IntervalKeys>,
    pub plan: ComptimeOption<PlannedKeys>,
    pub slopes: AlibiArg,
}

/// Keys with an interval of positions each.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct IntervalKeys {
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of first and end.
    pub intervals: Box<[Vector<u32, Const<2>>]>,
    /// Key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists).
    pub list: OwnedTensor<u32>,
    pub counts: OwnedTensor<u32>,
}

/// Keys of a tile plan, see [`mask`](crate::matrix::mask).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PlannedKeys {
    /// The bits of the plan, a pair of words per query and key block.
    pub bits: Box<[Vector<u32, Const<2>>]>,
    /// `[mask batch, mask heads, tiles, capacity]`: the content of a tile's columns.
    pub list: OwnedTensor<u32>,
    /// Header and counts of the lists.
    pub counts: OwnedTensor<u32>,
}

/// The outputs of a forward kernel; all are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Outputs<O: Float> {
    /// The rows of `[batch, q_heads, q_len, head_dim]`, in the given `order`.
    pub out: Box<[Vector<O, Const<2>>]>,
    /// The rounding errors of `out`, in its layout.
    pub residual: ComptimeOption<Box<[Vector<O, Const<2>>]>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// The rounding errors of `lse`, in its layout.
    pub lse_rest: ComptimeOption<Box<[f32]>>,
    pub order: RowOrder,
}

#[cube]
impl<O: Float> Outputs<O> {
    /// Writes the LSEs of a lane's two rows, and their rounding errors if requested.
    pub(crate) fn write_lse(&mut self, sums: &SoftmaxSums, to: &OutputRows) {
        sums.write_lse(to, &mut self.lse);
        #[comptime]
        match &mut self.lse_rest {
            ComptimeOption::Some(rest) => sums.write_lse_rest(to, rest),
            ComptimeOption::None => {}
        }
    }
}

/// The saved numbers of every query row, and the row sums of the backward pass.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedRows {
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`: the rounding errors of the LSEs.
    pub lse_rest: Box<[f32]>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub delta: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LaunchedTiles {
    pub first: u32,
    pub count: u32,
}

impl<E: Float, NQ: Size> OperandsLaunch<E, NQ> {
    pub(crate) fn of(rows: [&TensorBinding; 3]) -> Self {
        let [q, k, v] = rows.map(|rows| rows.clone().into_tensor_arg());
        Self::new(q, k, v)
    }
}

impl SourceTensors {
    /// The launch argument of kernels that own query tiles, with the ALiBi slopes.
    pub(crate) fn into_query_tiles(self, slopes: Option<TensorBinding>) -> KeySourceLaunch {
        let (mut intervals, mut plan) = (None, None);
        match self.keys {
            KeyTensors::All => {}
            KeyTensors::Intervals([pairs, list, counts]) => {
                let [list, counts] = [list, counts].map(TensorBinding::into_tensor_arg);
                let pairs = pairs.into_buffer_arg();
                intervals = Some(IntervalKeysLaunch::new(pairs, list, counts));
            }
            KeyTensors::Planned([bits, list, counts]) => {
                let [list, counts] = [list, counts].map(TensorBinding::into_tensor_arg);
                plan = Some(PlannedKeysLaunch::new(bits.into_buffer_arg(), list, counts));
            }
        }
        KeySourceLaunch::new(
            self.bias.map(TensorBinding::into_tensor_arg).into(),
            intervals.into(),
            plan.into(),
            slopes.map(TensorBinding::into_tensor_arg).into(),
        )
    }
}

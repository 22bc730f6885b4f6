//! The launch arguments of a decode step's kernels.

use crate::decode::args::{Pages, Slots, Tokens};
use crate::select::sort::{NEVER, sort_key};
use cubecl::prelude::*;

/// The cache, the new tokens, and the tokens' places.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepTensors<E: Float, N: Size> {
    /// The cache's keys, contiguous `[batch, kv_heads, window, head_dim]` or `[pages, kv_heads, page_len, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis.
    pub new_k: OwnedTensor<Vector<E, N>>,
    /// Like `new_k`.
    pub new_v: OwnedTensor<Vector<E, N>>,
    /// Present if keys have scores, as slots always do.
    pub scores: ComptimeOption<StepScores>,
    /// Slots: the slot of each token that takes one, contiguous `[batch * kv_heads, tokens]` of
    /// [entries](crate::decode::commit).
    pub moves: ComptimeOption<Box<[i32]>>,
    pub pages: ComptimeOption<PageTable>,
    /// Pages: how many of the last keys a query attends to, including its own; absent if it attends to all.
    pub window: ComptimeOption<u32>,
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepScores {
    /// Contiguous `[batch, kv_heads, window]` or `[pages, kv_heads, page_len]`.
    pub cached: Box<[f32]>,
    /// `[batch, kv_heads, tokens]`, last axis contiguous.
    pub new: OwnedTensor<f32>,
}

/// The pages that hold the tokens of a sequence.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageTable {
    /// Contiguous `[batch, max_pages]`.
    pub table: Box<[i32]>,
    /// The tokens that each sequence holds, `[batch]`.
    pub lengths: Box<[i32]>,
    pub max_pages: u32,
}

/// The contenders for the slots of a cache: the keys in them, and new tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Contenders {
    /// The cache's scores, contiguous `[batch, kv_heads, window]`.
    pub score: Box<[f32]>,
    /// Like `score`.
    pub position: Box<[i32]>,
    /// `[batch]`.
    pub seen: Box<[i32]>,
    /// `[batch, kv_heads, tokens]`, last axis contiguous.
    pub new_scores: OwnedTensor<f32>,
}

/// The rule by which the slots of a head are kept, see [`SelectionRule`](flash_dma_problem::SelectionRule).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SlotRule {
    pub window: u32,
    pub recent: i32,
    pub sinks: i32,
}

/// The worth of a key that no other can evict: more than any sort key.
const PROTECTED: u32 = u32::MAX;

/// The keys that a rule protects once a token has arrived.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Protection {
    /// The position of the first recent key.
    oldest: i32,
    sinks: i32,
}

#[cube]
impl SlotRule {
    /// The protection of a sequence whose last token is at `now`.
    pub(crate) fn at(&self, now: i32) -> Protection {
        Protection {
            oldest: max(now + 1i32 - self.recent, 0i32),
            sinks: self.sinks,
        }
    }
}

#[cube]
impl Protection {
    /// The worth of a key: its sort key, unless it is protected. An empty slot, of position -1 and score −∞, and a
    /// hidden key that is no longer recent are worth [`NEVER`](crate::select::sort::NEVER).
    pub(crate) fn worth(&self, score: f32, position: i32) -> u32 {
        let key = sort_key(score);
        let is_recent = position >= self.oldest;
        let is_sink = position < self.sinks && key != NEVER;
        select(
            is_recent || is_sink,
            u32::new(comptime!(PROTECTED as i64)),
            key,
        )
    }
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct NewTokens<E: Numeric, N: Size> {
    /// `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis.
    pub k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// Present if keys have scores: `[batch, kv_heads, tokens]`, last axis contiguous.
    pub scores: ComptimeOption<OwnedTensor<f32>>,
}

/// The start of a token's row in `[batch, kv_heads, tokens, head_dim]`, in elements.
#[cube]
pub(crate) fn row_at<F: CubePrimitive>(
    rows: &Tensor<F>,
    batch: usize,
    head: usize,
    token: usize,
) -> usize {
    batch * rows.stride(0) + head * rows.stride(1) + token * rows.stride(2)
}

/// A cache of slots. The rows of the moves are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SlotTensors<E: Numeric, N: Size> {
    /// Contiguous `[batch, kv_heads, window, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[batch, kv_heads, window]`.
    pub score: Box<[f32]>,
    /// Like `score`.
    pub position: Box<[i32]>,
    /// `[batch]`; the tokens are added.
    pub seen: Box<[i32]>,
    /// The slot of each token that takes one, contiguous `[batch * kv_heads, entries]` of
    /// [entries](crate::decode::commit); read.
    pub moves: Box<[i32]>,
}

/// A cache of pages. The rows of the new tokens are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageTensors<E: Numeric, N: Size> {
    /// Contiguous `[pages, kv_heads, page_len, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// Present if keys have scores: contiguous `[pages, kv_heads, page_len]`.
    pub scores: ComptimeOption<Box<[f32]>>,
    pub pages: PageTable,
}

/// The parts of the keys, and the merged outputs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergedParts<E: Float> {
    /// Contiguous `[parts, rows, head_dim]`, each row of a part divided by that part's own sum.
    pub part_out: Box<[Vector<f32, Const<2>>]>,
    /// Contiguous `[parts, rows]`, -inf where a row attends to none of the part's keys.
    pub part_lse: Box<[f32]>,
    /// The rounding errors of `part_lse`, in its layout.
    pub part_rest: Box<[f32]>,
    /// Contiguous `[rows, head_dim]`, overwritten.
    pub out: Box<[Vector<E, Const<2>>]>,
    /// Contiguous `[rows]`, overwritten.
    pub lse: Box<[f32]>,
}

impl Tokens {
    pub(crate) fn into_launch<E: Numeric, N: Size>(self) -> NewTokensLaunch<E, N> {
        NewTokensLaunch::new(
            self.k.into_tensor_arg(),
            self.v.into_tensor_arg(),
            self.scores.map(TensorBinding::into_tensor_arg).into(),
        )
    }
}

impl Slots {
    /// The launch argument, with the moves of the tokens that take slots.
    pub(crate) fn into_launch<E: Numeric, N: Size>(
        self,
        moves: TensorBinding,
    ) -> SlotTensorsLaunch<E, N> {
        SlotTensorsLaunch::new(
            self.k.into_tensor_arg(),
            self.v.into_tensor_arg(),
            self.score.into_buffer_arg(),
            self.position.into_buffer_arg(),
            self.seen.into_buffer_arg(),
            moves.into_buffer_arg(),
        )
    }
}

impl Pages {
    pub(crate) fn into_launch<E: Numeric, N: Size>(
        self,
        max_pages: usize,
    ) -> PageTensorsLaunch<E, N> {
        let table = self.table_launch(max_pages);
        PageTensorsLaunch::new(
            self.k.into_tensor_arg(),
            self.v.into_tensor_arg(),
            self.scores.map(TensorBinding::into_buffer_arg).into(),
            table,
        )
    }

    pub(crate) fn table_launch(&self, max_pages: usize) -> PageTableLaunch {
        PageTableLaunch::new(
            self.table.clone().into_buffer_arg(),
            self.lengths.clone().into_buffer_arg(),
            max_pages as u32,
        )
    }
}

//! The query tile that a cube owns: its heads, its rows' places in tensors, and their copies to shared memory.

use crate::matrix::args::{KeySource, LaunchedTiles, Operands};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::ptx::copy_or_zero;
use crate::matrix::rows::{CubeTile, CubeTileExpand, TileRow};
use crate::matrix::stages::copied_segment;
use crate::matrix::wgmma::panel::group_place;
use crate::pattern::layout::{TILE_LIST_HEADER, TILE_LIST_WORDS};
use crate::vectors::Segment;
use cubecl::prelude::*;

#[cube]
impl CubeTile {
    /// The tile of this cube's turn: the last tiles see the most keys, so they start first; if
    /// `bp.pattern.is_planned()`, those with the longest lists start first.
    pub(crate) fn new<E: Float, NQ: Size>(
        operands: &Operands<E, NQ>,
        source: &KeySource,
        launched: &LaunchedTiles,
        #[comptime] bp: MmaBlueprint,
    ) -> CubeTile {
        let (q_heads, q_len) = (operands.q.shape(1), operands.q.shape(2));
        let (kv_heads, k_len) = (operands.k.shape(1), operands.k.shape(2));
        let head = CUBE_POS_Y as usize * comptime!(bp.heads);
        let batch = head / q_heads;
        let kv_head = head % q_heads / (q_heads / kv_heads);
        let local = launched.count as usize - 1 - CUBE_POS_X as usize;
        let own = CubeTile {
            batch,
            q_heads,
            q_len,
            k_len,
            first_head: head % q_heads,
            kv_head,
            kv_row: batch * kv_heads + kv_head,
            tile: launched.first as usize + local,
            local,
            bp,
        };
        if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            let turn = tile_counts(&plan.list, &own, CUBE_POS_X as usize) + 3;
            own.with_tile(plan.counts[turn] as usize)
        } else {
            own
        }
    }

    /// The same heads with another query tile.
    fn with_tile(&self, tile: usize) -> CubeTile {
        CubeTile {
            batch: self.batch,
            q_heads: self.q_heads,
            q_len: self.q_len,
            k_len: self.k_len,
            first_head: self.first_head,
            kv_head: self.kv_head,
            kv_row: self.kv_row,
            tile,
            local: self.local,
            bp: self.bp,
        }
    }

    /// The offset of a row in `rows`, `[batch, q_heads, q_len, head_dim]`, in elements.
    pub(crate) fn offset<E: Float, N: Size>(
        &self,
        rows: &Tensor<Vector<E, N>>,
        row: &TileRow,
    ) -> usize {
        self.batch * rows.stride(0) + row.head * rows.stride(1) + row.query * rows.stride(2)
    }
}

/// The index of the first head of sequence `batch` among the heads of the outputs. If `bp.split`, each part of the keys
/// has its own outputs, in order of the parts.
#[cube]
pub(crate) fn first_output_head(
    batch: usize,
    batches: usize,
    q_heads: usize,
    #[comptime] bp: MmaBlueprint,
) -> usize {
    let mut sequence = batch;
    if comptime!(bp.split) {
        sequence += CUBE_POS_Z as usize * batches;
    }
    sequence * q_heads
}

/// Starts the copies of a query tile's rows of `rows`, `[batch, q_heads, q_len, head_dim]`, to `tile`,
/// `[warpgroups, head_dim / 64, 64 rows, 64]`; rows without a query become zeros.
#[cube]
pub(crate) fn copy_queries<E: Float>(
    rows: &Tensor<Segment<E>>,
    tile: &mut Shared<[Segment<E>]>,
    own: &CubeTile,
) {
    let bp = comptime!(own.bp);
    let segments = comptime!(bp.segments());
    #[unroll]
    for c in 0..comptime!(bp.tile_rows() * bp.segments() / bp.units()) {
        let segment = copied_segment(c, comptime!(bp.units()), segments);
        let owner = TileRow::new(segment.row, own);
        let to = group_place(segment.row, segment.col, segments);
        let from = own.offset(rows, &owner) / 8 + segment.col;
        let segment = &rows[from..from + 1];
        copy_or_zero(segment, &mut tile[to..to + 1], owner.valid, 16u32);
    }
}

/// The row (sequence and head) that the heads of a cube read from a mask or bias with the first two axes of `tensor`.
#[cube]
pub(crate) fn broadcast_row(tensor: &Tensor<u32>, own: &CubeTile) -> (usize, usize) {
    broadcast(tensor.shape(0), tensor.shape(1), own)
}

#[cube]
pub(crate) fn broadcast(batches: usize, heads: usize, own: &CubeTile) -> (usize, usize) {
    let mut batch = own.batch;
    if batches == 1 {
        batch = 0usize;
    }
    (batch, own.first_head / (own.q_heads / heads))
}

/// Offset of the scores or biases of a cube's keys, if keys have any.
#[cube]
pub(crate) fn score_row(source: &KeySource, own: &CubeTile) -> usize {
    let mut batch = own.batch;
    let mut head = own.kv_head;
    if comptime!(own.bp.pattern.has_intervals() || own.bp.pattern.has_key_bias()) {
        let scores = source.bias.as_ref().unwrap();
        if comptime!(own.bp.pattern.has_key_bias()) {
            (batch, head) = broadcast(scores.shape(0), scores.shape(1), own);
        }
        batch * scores.stride(0) + head * scores.stride(1)
    } else {
        0usize.runtime()
    }
}

#[cube]
pub(crate) fn tile_counts(list: &Tensor<u32>, own: &CubeTile, tile: usize) -> usize {
    let (batch, head) = broadcast_row(list, own);
    let tile = (batch * list.shape(1) + head) * list.shape(2) + tile;
    TILE_LIST_HEADER + tile * TILE_LIST_WORDS
}

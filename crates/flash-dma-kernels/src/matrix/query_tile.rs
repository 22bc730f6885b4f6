//! The queries of a tile's rows, their copies to shared memory, and the write-back of a warpgroup's rows.

use crate::alibi::{AlibiArg, AlibiRow};
use crate::host::check::queries_before_heads;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::ptx::copy_or_zero;
use crate::matrix::stages::copied_segment;
use crate::matrix::wgmma::panel::group_place;
use crate::pattern::layout::{TILE_LIST_HEADER, TILE_LIST_WORDS};
use crate::pattern::position::last_key;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The query tile and the heads that a cube of the query-outer kernels owns: tile
/// `first_tile + CUBE_COUNT_X - 1 - CUBE_POS_X`, of the heads from `CUBE_POS_Y * bp.heads` on, counted over all
/// sequences.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct CubeTile {
    pub batch: usize,
    pub q_heads: usize,
    /// Queries and keys of a sequence.
    pub q_len: usize,
    pub k_len: usize,
    /// The first head of the tile's rows, in the sequence.
    pub first_head: usize,
    /// Their kv head, in the sequence and over all sequences.
    pub kv_head: usize,
    pub kv_row: usize,
    /// The query tile, and its index among the launched ones.
    pub tile: usize,
    pub local: usize,
    #[cube(comptime)]
    pub bp: MmaBlueprint,
}

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

/// One row of a query tile, as its quad of lanes sees it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileRow {
    /// True if the row has a query.
    pub valid: bool,
    pub query: usize,
    /// The query's head among all heads of `q`.
    pub head: usize,
    /// The index of the last key it may see, negative if it sees none.
    pub position: i32,
}

#[cube]
impl TileRow {
    /// Row `row` of the tile that a cube owns: query `row / heads` of head `row % heads`.
    pub(crate) fn new(row: usize, own: &CubeTile) -> TileRow {
        let bp = comptime!(own.bp);
        let heads = comptime!(bp.heads);
        let query = own.tile * comptime!(bp.queries()) + row / heads;
        TileRow {
            valid: row < comptime!(bp.queries() * bp.heads) && query < own.q_len,
            query,
            head: own.first_head + row % heads,
            position: last_key(query, own.q_len, own.k_len, bp.causal),
        }
    }

    /// The same row, with keys counted from key `begin`.
    pub(crate) fn starting_at(&self, begin: usize) -> TileRow {
        TileRow {
            valid: self.valid,
            query: self.query,
            head: self.head,
            position: self.position - begin as i32,
        }
    }
}

/// The two rows of a tile whose elements a lane holds in an accumulator: of the sixteen rows of its warp, row
/// `lane / 4` and the row eight further down.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowPair {
    pub upper: TileRow,
    pub lower: TileRow,
    /// Their ALiBi, if there is any.
    pub upper_alibi: ComptimeOption<AlibiRow>,
    pub lower_alibi: ComptimeOption<AlibiRow>,
}

#[cube]
impl RowPair {
    /// Row `upper` of the tile that a cube owns and the one eight rows below, with keys counted from key `begin`.
    pub(crate) fn new(upper: usize, own: &CubeTile, begin: usize, slopes: &AlibiArg) -> RowPair {
        let lower = TileRow::new(upper + 8, own).starting_at(begin);
        let upper = TileRow::new(upper, own).starting_at(begin);
        let upper_alibi = row_alibi(slopes, own, &upper);
        let lower_alibi = row_alibi(slopes, own, &lower);
        RowPair {
            upper,
            lower,
            upper_alibi,
            lower_alibi,
        }
    }
}

/// The indices of a lane's two rows among the rows of outputs, and whether each exists.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct OutputRows {
    pub upper: usize,
    pub lower: usize,
    pub has_upper: bool,
    pub has_lower: bool,
}

#[cube]
impl OutputRows {
    /// The indices in `[.., heads, q_len]`; `first_head` is the sequence's first head there.
    pub(crate) fn of_pair(rows: &RowPair, first_head: usize, q_len: usize) -> OutputRows {
        OutputRows {
            upper: (first_head + rows.upper.head) * q_len + rows.upper.query,
            lower: (first_head + rows.lower.head) * q_len + rows.lower.query,
            has_upper: rows.upper.valid,
            has_lower: rows.lower.valid,
        }
    }

    /// The indices among rows of the given order.
    pub(crate) fn in_order(
        rows: &RowPair,
        first_head: usize,
        q_len: usize,
        order: &RowOrder,
    ) -> OutputRows {
        OutputRows {
            upper: order.place(first_head * q_len, rows.upper.head, rows.upper.query),
            lower: order.place(first_head * q_len, rows.lower.head, rows.lower.query),
            has_upper: rows.upper.valid,
            has_lower: rows.lower.valid,
        }
    }
}

/// The order of the rows of a sequence, `[q_heads, q_len]`, which lie without gaps.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowOrder {
    /// Number of rows from one head to the next.
    head: u32,
    /// Number of rows from one query to the next.
    query: u32,
}

impl RowOrder {
    /// The launch argument for the order of `rows`, `[.., q_heads, q_len, head_dim]`.
    pub(crate) fn of(rows: &TensorBinding) -> RowOrderLaunch {
        let axes = rows.shape.len();
        let (heads, len) = (rows.shape[axes - 3], rows.shape[axes - 2]);
        let (head, query) = match queries_before_heads(rows) {
            false => (len, 1),
            true => (1, heads),
        };
        RowOrderLaunch::new(head as u32, query as u32)
    }
}

#[cube]
impl RowOrder {
    /// The index of the row of a head and a query of the sequence whose first row has the index `first`.
    pub(crate) fn place(&self, first: usize, head: usize, query: usize) -> usize {
        first + head * self.head as usize + query * self.query as usize
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

/// ALiBi of a row, whose place is the index of the key at the same position.
#[cube]
pub(crate) fn row_alibi(
    slopes: &AlibiArg,
    own: &CubeTile,
    row: &TileRow,
) -> ComptimeOption<AlibiRow> {
    slopes.as_ref().map(|slopes| AlibiRow {
        slope: slopes[row.head],
        place: f32::cast_from((row.query + own.k_len) as i32 - own.q_len as i32),
    })
}

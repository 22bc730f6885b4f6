//! The rows of query tiles: the query and the head of each, the pair of rows that a lane holds, and their order in outputs.

use crate::alibi::{AlibiArg, AlibiRow};
use crate::host::check::queries_before_heads;
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::position::last_key;
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

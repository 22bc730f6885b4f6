//! Which rows of a tile attend to which columns of a gathered block.

use crate::simd::LANES;
use crate::tile_plan::{WORD, WORDS};
use flash_dma_problem::PlanGeometry;

/// A row of a tile: its number, and its query's number among those of its head.
#[derive(Clone, Copy)]
pub(crate) struct RowQuery {
    pub(crate) row: usize,
    pub(crate) query: usize,
}

/// Visible pairs, [`LANES`] columns at a time.
pub(crate) trait VisiblePairs: Copy {
    type Lanes: VisibleLanes;

    /// The columns from `lanes * LANES` on.
    fn lanes(self, row: RowQuery, lanes: usize) -> Self::Lanes;

    fn contains(self, row: RowQuery, column: usize) -> bool {
        self.lanes(row, column / LANES).contains(column % LANES)
    }
}

/// Visible columns among [`LANES`].
pub(crate) trait VisibleLanes: Copy {
    fn contains(self, lane: usize) -> bool;
}

/// Either kind of visible pairs. The innermost loops read each in its own form: bits would have to be made for each row
/// of an interval, and a mask has no intervals.
#[derive(Clone, Copy)]
pub(crate) enum Visibility<'a> {
    Queries(QueryRanges<'a>),
    Bits(BitRows<'a>),
}

impl Visibility<'_> {
    pub(crate) fn contains(&self, row: RowQuery, column: usize) -> bool {
        match self {
            Self::Queries(pairs) => pairs.contains(row, column),
            Self::Bits(pairs) => pairs.contains(row, column),
        }
    }
}

/// For each column the queries `start..end` that attend to it, in every head.
#[derive(Clone, Copy)]
pub(crate) struct QueryRanges<'a> {
    pub(crate) start: &'a [[i32; LANES]],
    pub(crate) end: &'a [[i32; LANES]],
}

#[derive(Clone, Copy)]
pub(crate) struct QueryLanes<'a> {
    start: &'a [i32; LANES],
    end: &'a [i32; LANES],
    query: i32,
}

impl<'a> VisiblePairs for QueryRanges<'a> {
    type Lanes = QueryLanes<'a>;

    #[inline(always)]
    fn lanes(self, row: RowQuery, lanes: usize) -> QueryLanes<'a> {
        QueryLanes {
            start: &self.start[lanes],
            end: &self.end[lanes],
            query: row.query as i32,
        }
    }
}

impl VisibleLanes for QueryLanes<'_> {
    #[inline(always)]
    fn contains(self, lane: usize) -> bool {
        (self.start[lane] <= self.query) & (self.query < self.end[lane])
    }
}

/// A bit per pair.
#[derive(Clone, Copy)]
pub(crate) struct BitRows<'a> {
    /// `[key blocks, rows]`.
    pub(crate) words: &'a [[u32; WORDS]],
    pub(crate) rows: usize,
}

impl VisiblePairs for BitRows<'_> {
    type Lanes = u32;

    #[inline(always)]
    fn lanes(self, row: RowQuery, lanes: usize) -> u32 {
        let column = lanes * LANES;
        let block = column / PlanGeometry::KEY_BLOCK;
        let at = column % PlanGeometry::KEY_BLOCK;
        self.words[block * self.rows + row.row][at / WORD] >> (at % WORD)
    }
}

impl VisibleLanes for u32 {
    #[inline(always)]
    fn contains(self, lane: usize) -> bool {
        self >> lane & 1 == 1
    }
}

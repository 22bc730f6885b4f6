//! The keys of a tile of queries, from any source.

use super::KeyList;
use super::intervals::IntervalLists;
use super::planned::PlannedLists;
use crate::keys::operands::KeySource;
use crate::position::Positions;
use crate::queries::QueryRows;
use flash_dma_problem::{PlanGeometry, Problem};
use std::ops::Range;

/// The keys of one chunk of queries, listed tile by tile: whole blocks by a mask, single keys by intervals.
pub(crate) enum TileKeys<'a> {
    Intervals {
        lists: IntervalLists,
        positions: Positions,
    },
    Planned(PlannedLists<'a>),
}

impl<'a> TileKeys<'a> {
    pub(crate) fn new(source: &KeySource<'a>, problem: &Problem, chunk: &QueryRows) -> Self {
        let k_len = problem.k_len;
        let positions = Positions::from(problem);
        let span = positions.span(&chunk.queries);
        let lists = match source {
            KeySource::All => IntervalLists::new(None, k_len, span),
            KeySource::Intervals(intervals) => {
                let row = chunk.kv_head.batch * problem.kv_heads + chunk.kv_head.head;
                let intervals = &intervals[row * k_len..(row + 1) * k_len];
                IntervalLists::new(Some(intervals), k_len, span)
            }
            KeySource::Ranked(ranked) => IntervalLists::ranked(ranked, k_len, chunk.kv_head, span),
            KeySource::Planned(bits) => {
                return Self::Planned(PlannedLists::new(*bits, k_len, chunk));
            }
        };
        Self::Intervals { lists, positions }
    }

    /// Lists the keys of a tile of the chunk; the tiles come in order.
    pub(crate) fn advance(&mut self, tile: &QueryRows) {
        match self {
            Self::Intervals { lists, positions } => lists.advance(positions.span(&tile.queries)),
            Self::Planned(lists) => lists.advance(tile),
        }
    }

    pub(crate) fn list(&self) -> &KeyList {
        match self {
            Self::Intervals { lists, .. } => &lists.keys,
            Self::Planned(lists) => &lists.keys,
        }
    }

    pub(crate) fn into_index(self) -> Vec<u32> {
        match self {
            Self::Intervals { lists, .. } => lists.keys.index,
            Self::Planned(lists) => lists.keys.index,
        }
    }

    /// True if every row of the tile attends to every key that it lists.
    pub(crate) fn is_full(&self) -> bool {
        let count = self.list().entries.len();
        match self {
            Self::Intervals { lists, .. } => lists.full == count,
            Self::Planned(lists) => lists.is_full(&(0..count)),
        }
    }

    /// The places of the tile's keys, up to `wanted` at a time; key blocks of a plan stay whole.
    pub(crate) fn blocks(&self, wanted: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.list().entries.len();
        let step = match self {
            Self::Intervals { .. } => wanted,
            Self::Planned(_) => wanted / PlanGeometry::KEY_BLOCK * PlanGeometry::KEY_BLOCK,
        };
        (0..count)
            .step_by(step)
            .map(move |start| start..count.min(start + step))
    }
}

//! The steps of a dk/dv cube: the queries that it streams, and which of its keys they see.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::mask::{KeyMask, StepList};
use crate::backward::dkdv::shared::queries::{Cursor, Range};
use crate::backward::dkdv::shared::seen::SeenWords;
use crate::matrix::ptx::uniform;
use cubecl::prelude::*;

/// The steps of a cube in order: a range's tiles for each group of heads in turn, or the steps of a list.
#[derive(CubeType)]
pub(crate) struct Steps {
    /// The number of steps.
    pub count: usize,
    range: Range,
    /// The step whose copies start next, and the one in use; without a mask.
    coming: Cursor,
    present: Cursor,
    list: StepList,
    /// The entry in use, and the following one, read one iteration ahead; masked only.
    entry: u32,
    next: u32,
}

#[cube]
impl Steps {
    /// The steps over the tiles of `range` for `group` heads.
    pub(crate) fn of_range(range: &Range, group: usize, #[comptime] bp: DkdvBlueprint) -> Steps {
        Steps {
            count: uniform(range.tiles * (group / comptime!(bp.heads))),
            range: Range {
                first: range.first,
                tiles: range.tiles,
                full_from: range.full_from,
                full_to: range.full_to,
            },
            coming: Cursor::first(range),
            present: Cursor::first(range),
            list: StepList::none(),
            entry: 0u32,
            next: 0u32,
        }
    }

    /// The steps of a list.
    pub(crate) fn listed(list: StepList) -> Steps {
        let range = Range::none();
        let mut entry = 0u32;
        let mut next = 0u32;
        if list.total > 0 {
            entry = list.entry(0usize);
            next = list.entry(1usize);
        }
        Steps {
            count: list.total,
            coming: Cursor::first(&range),
            present: Cursor::first(&range),
            range,
            list,
            entry,
            next,
        }
    }

    /// The step whose copies start next, at turn `turn`.
    pub(crate) fn coming(&self, turn: usize, #[comptime] bp: DkdvBlueprint) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(self.list.entry(turn), bp)
        } else {
            Cursor {
                tile: self.coming.tile,
                head: self.coming.head,
            }
        }
    }

    /// Advances past it.
    pub(crate) fn advance_coming(&mut self, #[comptime] bp: DkdvBlueprint) {
        if comptime!(!bp.pattern.is_planned()) {
            self.coming.advance(&self.range, bp);
        }
    }

    /// The step in use.
    pub(crate) fn present(&self, #[comptime] bp: DkdvBlueprint) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(self.entry, bp)
        } else {
            Cursor {
                tile: self.present.tile,
                head: self.present.head,
            }
        }
    }

    /// Advances past it; `turn` is its turn.
    pub(crate) fn advance_present(&mut self, turn: usize, #[comptime] bp: DkdvBlueprint) {
        if comptime!(bp.pattern.is_planned()) {
            self.entry = self.next;
            self.next = self.list.entry(turn + 2);
        } else {
            self.present.advance(&self.range, bp);
        }
    }

    /// Whether all queries of the step at turn `turn` see all keys.
    pub(crate) fn is_whole(&self, turn: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        let query = self.present(bp).tile * comptime!(bp.queries());
        let mut whole = self.range.full_from <= query as i32
            && (query + comptime!(bp.queries())) as i32 <= self.range.full_to;
        if comptime!(bp.pattern.is_planned()) {
            whole = turn < self.list.whole;
        }
        whole
    }

    /// The pairs of the step at turn `turn` that this warp sees.
    pub(crate) fn seen(
        &self,
        turn: usize,
        mask: &KeyMask,
        q_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> SeenWords {
        let mut whole = true;
        if comptime!(bp.pattern.is_planned()) {
            whole = turn < self.list.whole;
        }
        let step = self.present(bp);
        SeenWords::read(
            mask,
            step.head,
            step.tile * comptime!(bp.queries()),
            whole,
            q_len,
            bp,
        )
    }
}

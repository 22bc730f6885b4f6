//! The steps of a dk/dv cube: the queries that it streams, and the keys they see.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::mask::{KeyMask, SeenWords};
use crate::backward::dkdv::shared::queries::{QueryRows, StepLses};
use crate::backward::dkdv::shared::steps::{Cursor, StepOrder};
use crate::backward::dkdv::wgmma::queries::{StepCopies, Tiles, step_at};
use crate::backward::dkdv::wgmma::weights::StagedStep;
use crate::matrix::ptx::uniform;
use crate::matrix::wgmma::ring::Ring;
use cubecl::prelude::*;

/// The steps of a cube, and its place among them.
#[derive(CubeType)]
pub(crate) struct Steps {
    pub count: usize,
    order: StepOrder,
    /// The step whose copies start next, and the one in use; without a mask.
    coming: Cursor,
    present: Cursor,
    /// The entry in use, and the following one, read one iteration ahead; masked only.
    entry: u32,
    next: u32,
}

#[cube]
impl Steps {
    /// At the first step of `order`.
    pub(crate) fn new(order: StepOrder, #[comptime] bp: DkdvBlueprint) -> Steps {
        let mut entry = 0u32;
        let mut next = 0u32;
        let count = if comptime!(bp.pattern.is_planned()) {
            if order.count > 0 {
                entry = order.list.entry(0usize);
                next = order.list.entry(1usize);
            }
            order.count
        } else {
            uniform(order.count)
        };
        Steps {
            count,
            coming: Cursor::first(&order.range),
            present: Cursor::first(&order.range),
            order,
            entry,
            next,
        }
    }

    /// Goes back to the first step, of one or more.
    pub(crate) fn restart(&mut self, #[comptime] bp: DkdvBlueprint) {
        if comptime!(bp.pattern.is_planned()) {
            self.entry = self.order.list.entry(0usize);
            self.next = self.order.list.entry(1usize);
        } else {
            self.coming.tile = self.order.range.first;
            self.coming.head = 0usize;
            self.present.tile = self.order.range.first;
            self.present.head = 0usize;
        }
    }

    /// The step whose copies start next, at turn `turn`.
    pub(crate) fn coming(&self, turn: usize, #[comptime] bp: DkdvBlueprint) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(self.order.list.entry(turn), bp)
        } else {
            Cursor {
                tile: self.coming.tile,
                head: self.coming.head,
            }
        }
    }

    /// Advances past the step whose copies start next.
    pub(crate) fn advance_coming(&mut self, #[comptime] bp: DkdvBlueprint) {
        if comptime!(!bp.pattern.is_planned()) {
            self.coming.advance(&self.order.range, bp);
        }
    }

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

    /// Advances past the step in use; `turn` is its turn.
    pub(crate) fn advance_present(&mut self, turn: usize, #[comptime] bp: DkdvBlueprint) {
        if comptime!(bp.pattern.is_planned()) {
            self.entry = self.next;
            self.next = self.order.list.entry(turn + 2);
        } else {
            self.present.advance(&self.order.range, bp);
        }
    }

    /// Starts the copies of the first steps.
    pub(crate) fn fill(&mut self, ring: &Ring, copies: &StepCopies, #[comptime] bp: DkdvBlueprint) {
        #[unroll]
        for turn in 0..comptime!(bp.stages - 2) {
            if turn < self.count {
                if UNIT_POS == 0 {
                    copies.start(ring, &self.coming(turn, bp), turn, bp);
                }
                self.advance_coming(bp);
            }
        }
    }

    /// Starts the copies of the step that takes the stage which no warpgroup uses from turn `turn` on.
    pub(crate) fn refill(
        &mut self,
        turn: usize,
        ring: &Ring,
        copies: &StepCopies,
        #[comptime] bp: DkdvBlueprint,
    ) {
        let stages = comptime!(bp.stages);
        let coming = turn + comptime!(bp.stages - 2);
        if coming < self.count {
            if UNIT_POS == 0 {
                if turn >= 2 {
                    ring.wait_empty((turn - 2) % stages, (turn - 2) / stages);
                }
                copies.start(ring, &self.coming(coming, bp), coming, bp);
            }
            self.advance_coming(bp);
        }
    }

    /// The locations of a step's LSEs, see [`StepLses::of`].
    pub(crate) fn lses<'a, E: Float>(
        &self,
        inputs: &'a BackwardInputs<E>,
        step: &StagedStep,
        rows: &QueryRows,
        #[comptime] bp: DkdvBlueprint,
    ) -> StepLses<'a> {
        StepLses::of::<E>(inputs, &step.at, step.turn, &self.order, rows, bp)
    }

    /// True if all queries of the step at turn `turn` see all keys.
    pub(crate) fn is_full(&self, turn: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        let query = self.present(bp).tile * comptime!(bp.queries());
        self.order.is_full(turn, query, bp)
    }

    /// The pairs of the step at turn `turn` that this warp sees.
    pub(crate) fn seen(
        &self,
        turn: usize,
        mask: &KeyMask,
        q_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> SeenWords {
        let mut full = true;
        if comptime!(bp.pattern.is_planned()) {
            full = turn < self.order.list.full;
        }
        let step = self.present(bp);
        let query = step.tile * comptime!(bp.queries());
        SeenWords::read(mask, step.head, query, full, q_len, bp)
    }
}

/// The step in use at turn `turn`, whose tile has landed; `words` are its queries' mask words.
#[cube]
pub(crate) fn staged_step<E: Float>(
    turn: usize,
    steps: &Steps,
    words: &SeenWords,
    tiles: &mut Tiles<E>,
    place: &ChunkTile,
    mask: &KeyMask,
    #[comptime] bp: DkdvBlueprint,
) -> StagedStep {
    let stage = turn % comptime!(bp.stages);
    let present = steps.present(bp);
    let query = present.tile * comptime!(bp.queries());
    let mut head = 0usize;
    if comptime!(bp.pattern.has_pair_bias() || bp.slopes > 0) {
        // Copied, because `present` aliases the cursor's variables, which advance before the head is read.
        head = present.head;
    }
    let mut at = step_at::<E>(stage, query, head, steps.is_full(turn, bp), tiles, bp);
    let mut learns = false;
    if comptime!(bp.kept) {
        learns = steps.order.all_learn(query);
        // Pairs of a boundary step are tested one by one.
        at.boundary = at.boundary || (!learns && steps.order.some_learn(query, bp));
    }
    let mut seen = 0u32;
    if comptime!(bp.pattern.is_planned()) {
        // After the products: the words have arrived by now.
        if at.boundary {
            let (q_len, k_len) = (place.sizes.q_len, place.sizes.k_len);
            seen = words.pack(query, mask, q_len, k_len, 0usize, bp);
        }
    }
    StagedStep {
        at,
        turn,
        stage,
        seen,
        learns,
    }
}

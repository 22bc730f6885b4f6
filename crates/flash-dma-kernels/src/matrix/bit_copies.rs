//! The copies of a tile plan's bits to shared memory.

use crate::matrix::args::KeySource;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::mask::step_of;
use crate::matrix::ptx::{copy_pair, copy_word, global_address, shared_address};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::pattern::layout::KEY_BLOCK;
use cubecl::prelude::*;

/// This unit's part in the copies of the bits of a cube's steps: the bits of one query.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BitCopies {
    /// Address of the pair of words of step or block 0, and the stride in bytes.
    first: u64,
    step: u32,
    /// Address of the list.
    list: u64,
    /// Addresses of the stages in shared memory.
    stages: u32,
}

#[cube]
impl BitCopies {
    /// Copies nothing unless `bp.pattern.is_planned()`.
    pub(crate) fn new<E: Float>(
        source: &KeySource,
        attended: &AttendedKeys,
        stages: &Stages<E>,
    ) -> BitCopies {
        let bp = comptime!(attended.own.bp);
        let keys = &attended.keys;
        let mask = &attended.mask;
        let mut copies = BitCopies {
            first: 0u64,
            step: 0u32,
            list: 0u64,
            stages: 0u32,
        };
        if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            let unit = UNIT_POS as usize;
            if mask.gathered {
                let first = mask.list + unit * 2;
                copies.first = global_address(&plan.list[first..first + 1]);
                copies.step = comptime!((bp.queries() * 8) as u32);
            } else {
                // A row past the last query reads that query's bits, and writes nothing.
                let query = min(mask.first_query + unit, attended.own.q_len - 1);
                let first = mask.base + query * mask.query_step;
                copies.first = global_address(&plan.bits[first..first + 1]);
                copies.step = mask.block_step as u32 * 8;
            }
            copies.list = global_address(&plan.list[keys.list..keys.list + 1]);
            copies.stages = shared_address(&stages.intervals[0..1]);
        }
        copies
    }

    /// Starts the copies of the step of key tile `tile`, of key block `block` if keys are not gathered, unless all
    /// queries see all of it.
    pub(crate) fn start(
        &self,
        keys: &TileKeys,
        tile: usize,
        block: u32,
        #[comptime] bp: MmaBlueprint,
    ) {
        let unit = UNIT_POS;
        let step = step_of(tile, bp);
        if step >= keys.full / KEY_BLOCK && unit < comptime!(bp.queries() as u32) {
            let stage = (tile % comptime!(bp.stages)) as u32;
            let place = self.stages + stage * comptime!((bp.stage_intervals() * 8) as u32);
            let at = select(keys.gathered, step as u32, block);
            copy_pair(self.first, at, self.step, place + unit * 8);
            if unit == 0 {
                // It is not read if keys are gathered.
                let to = place + comptime!((bp.queries() * 8) as u32);
                copy_word(self.list, step as u32, to);
            }
        }
    }
}

//! The keys of a query tile, copied into shared memory ahead of their use.

use crate::matrix::args::{KeySource, Operands};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::mask::step_of;
use crate::matrix::ptx::{
    copy_of_row, copy_or_zero, copy_pair, copy_word, global_address, read_ahead, shared_address,
    uniform,
};
use crate::matrix::stages::{Stages, copied_segment, place_of};
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::panel::panel_width;
use crate::matrix::wgmma::ring::Ring;
use crate::pattern::layout::KEY_BLOCK;
use cubecl::prelude::*;

/// This unit's part of the copies of a cube's key tiles.
#[derive(CubeType)]
pub(crate) struct KeyCopies {
    /// Address of the column of its first segment in K and V, and the row strides in bytes.
    k: u64,
    v: u64,
    k_stride: u32,
    v_stride: u32,
    /// Address of the list; sparse only.
    list: u64,
    /// Addresses of the stages in shared memory.
    k_stages: u32,
    v_stages: u32,
    /// Offset of its first segment in a stage, in bytes.
    own: u32,
    /// The last key of the head; masked only.
    last: u32,
    /// True if the list of a tile plan has single keys; masked only.
    gathered: bool,
    /// The copies of the visibility bits; masked only.
    bits: BitCopies,
    /// The keys of the next tile that it copies, `bp.copies()` of them, and one whose score and interval it copies:
    /// read one tile ahead of their use, so that the copies do not wait. With the blocks of a tile plan, the first
    /// entry is the block of that tile.
    next: Array<u32>,
    #[cube(comptime)]
    bp: MmaBlueprint,
}

#[cube]
impl KeyCopies {
    pub(crate) fn new<E: Float, NQ: Size>(
        operands: &Operands<E, NQ>,
        source: &KeySource,
        attended: &AttendedKeys,
        stages: &Stages<E>,
    ) -> KeyCopies {
        let bp = comptime!(attended.own.bp);
        let keys = &attended.keys;
        let k_rows = &attended.k_rows;
        let v_rows = &attended.v_rows;
        let bits = BitCopies::new::<E>(source, attended, stages);
        let own = copied_segment(0usize, comptime!(bp.units()), comptime!(bp.segments()));
        let (k_first, v_first) = (k_rows.base + own.col, v_rows.base + own.col);
        let mut next = Array::<u32>::new(comptime!(bp.copies() + 1));
        let mut first = 0u64;
        if comptime!(bp.pattern.has_intervals()) {
            let lists = source.intervals.as_ref().unwrap();
            first = global_address(&lists.list[keys.list..keys.list + 1]);
        } else if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            first = global_address(&plan.list[keys.list..keys.list + 1]);
        }
        #[unroll]
        for c in 0..comptime!(bp.copies() + 1) {
            next[c] = 0u32;
        }
        let mut copies = KeyCopies {
            k: global_address(&operands.k[k_first..k_first + 1]),
            v: global_address(&operands.v[v_first..v_first + 1]),
            // The host checks that 32 bits hold them.
            k_stride: k_rows.stride as u32 * 16,
            v_stride: v_rows.stride as u32 * 16,
            list: first,
            k_stages: uniform(shared_address(&stages.k[0..1]) as usize) as u32,
            v_stages: uniform(shared_address(&stages.v[0..1]) as usize) as u32,
            own: place_of(own.row, own.col, bp) as u32 * 16,
            last: operands.k.shape(2) as u32 - 1,
            gathered: keys.gathered,
            bits,
            next,
            bp,
        };
        if keys.total > 0 {
            copies.read(keys, 0usize);
        }
        copies
    }

    fn read(&mut self, keys: &TileKeys, tile: usize) {
        let bp = comptime!(self.bp);
        if comptime!(bp.pattern.has_intervals()) {
            self.read_keys(keys, tile);
        } else if comptime!(bp.pattern.is_planned()) {
            if self.gathered {
                self.read_keys(keys, tile);
            } else {
                let column = within(tile * comptime!(bp.key_tile), keys);
                self.next[0] = read_ahead(self.list, (column / KEY_BLOCK) as u32);
            }
        }
    }

    fn read_keys(&mut self, keys: &TileKeys, tile: usize) {
        let bp = comptime!(self.bp);
        let first = tile * comptime!(bp.key_tile);
        #[unroll]
        for c in 0..comptime!(bp.copies()) {
            let own = copied_segment(c, comptime!(bp.units()), comptime!(bp.segments()));
            self.next[c] = read_ahead(self.list, within(first + own.row, keys) as u32);
        }
        let unit = UNIT_POS as usize;
        if unit < comptime!(bp.key_tile) {
            self.next[comptime!(bp.copies())] =
                read_ahead(self.list, within(first + unit, keys) as u32);
        }
    }

    /// Turns the block of the next tile, `tile`, into its keys, if they are not listed one by one; columns past the
    /// last key repeat that key.
    fn resolve(&mut self, tile: usize) {
        let bp = comptime!(self.bp);
        if !self.gathered {
            let mut first = self.next[0] * comptime!(KEY_BLOCK as u32);
            if comptime!(bp.key_tile < KEY_BLOCK) {
                first += (tile * comptime!(bp.key_tile) % KEY_BLOCK) as u32;
            }
            #[unroll]
            for c in 0..comptime!(bp.copies()) {
                let own = copied_segment(c, comptime!(bp.units()), comptime!(bp.segments()));
                self.next[c] = min(first + own.row as u32, self.last);
            }
            if comptime!(bp.pattern.has_key_bias() || bp.notes_columns()) {
                self.next[comptime!(bp.copies())] = min(first + UNIT_POS, self.last);
            }
        }
    }

    /// Starts the copies of tile `tile`, which has keys, into its stage, and reads the keys of the following tile;
    /// tiles must come in order. Columns past the last key repeat that key, which is hidden from every query there.
    pub(crate) fn start<E: Float>(
        &mut self,
        source: &KeySource,
        attended: &AttendedKeys,
        tile: usize,
        stages: &mut Stages<E>,
    ) {
        let interval_row = attended.interval_row();
        self.start_at::<E>(source, attended, interval_row, tile, stages);
    }

    fn start_at<E: Float>(
        &mut self,
        source: &KeySource,
        attended: &AttendedKeys,
        interval_row: usize,
        tile: usize,
        stages: &mut Stages<E>,
    ) {
        let bp = comptime!(self.bp);
        let keys = &attended.keys;
        let score_row = attended.score_row;
        let key_tile = comptime!(bp.key_tile);
        let (units, segments) = comptime!((bp.units(), bp.segments()));
        let stage = tile % comptime!(bp.stages);
        let begin = stage as u32 * comptime!((bp.key_tile * bp.segments() * 16) as u32);
        let column = copied_segment(0usize, units, segments).col;
        if comptime!(bp.pattern.is_planned()) {
            self.bits.start(keys, tile, self.next[0], bp);
            self.resolve(tile);
        }
        #[unroll]
        for c in 0..comptime!(bp.copies()) {
            let segment = copied_segment(c, units, segments);
            let mut key = self.next[c];
            if comptime!(!bp.pattern.has_intervals() && !bp.pattern.is_planned()) {
                key = within(tile * key_tile + segment.row, keys) as u32;
            }
            // Whole groups of eight rows further down in the same column: the same swizzle.
            let mut place =
                self.own + comptime!((c * units / segments * 2 * panel_width(8 * segments)) as u32);
            let (mut k, mut v) = (self.k, self.v);
            if comptime!(!bp.regular_copies()) {
                place = place_of(segment.row, segment.col, bp) as u32 * 16;
                let further = (segment.col as i32 - column as i32) as i64 * 16;
                k = (k as i64 + further) as u64;
                v = (v as i64 + further) as u64;
            }
            if comptime!((c + 1) * units <= bp.key_tile * segments) || segment.row < key_tile {
                copy_of_row(k, key, self.k_stride, self.k_stages + begin + place);
                copy_of_row(v, key, self.v_stride, self.v_stages + begin + place);
            }
        }
        if comptime!(bp.pattern.has_intervals()) {
            let scores = source.bias.as_ref().unwrap();
            let lists = source.intervals.as_ref().unwrap();
            let unit = UNIT_POS as usize;
            if unit < key_tile {
                let place = stage * key_tile + unit;
                let there = tile * key_tile + unit < keys.total;
                let key = self.next[comptime!(bp.copies())] as usize;
                let from = score_row + key;
                let score = &scores[from..from + 1];
                copy_or_zero(score, &mut stages.scores[place..place + 1], there, 4u32);
                let from = interval_row + key;
                let interval = &lists.intervals[from..from + 1];
                let to = &mut stages.intervals[place..place + 1];
                copy_or_zero(interval, to, there, 8u32);
            }
        } else if comptime!(bp.pattern.has_key_bias()) {
            let scores = source.bias.as_ref().unwrap();
            let unit = UNIT_POS as usize;
            if unit < key_tile {
                let place = stage * key_tile + unit;
                let mut key = self.next[comptime!(bp.copies())] as usize;
                if comptime!(!bp.pattern.is_planned()) {
                    key = within(tile * key_tile + unit, keys);
                }
                let from = score_row + key;
                let score = &scores[from..from + 1];
                copy_or_zero(score, &mut stages.scores[place..place + 1], true, 4u32);
            }
        }
        if comptime!(bp.notes_columns()) {
            let unit = UNIT_POS as usize;
            if unit < key_tile {
                let mut key = self.next[comptime!(bp.copies())] as usize;
                if comptime!(!bp.pattern.has_intervals() && !bp.pattern.is_planned()) {
                    key = keys.begin + within(tile * key_tile + unit, keys);
                }
                stages.set_column(stage * key_tile + unit, key, &attended.dropout);
            }
        }
        self.read(&attended.keys, tile + 1);
    }

    /// [`start`](Self::start) as soon as the ring's stage is empty; it is full when all units' copies have landed.
    pub(crate) fn fill<E: Float>(
        &mut self,
        ring: &Ring,
        source: &KeySource,
        attended: &AttendedKeys,
        tile: usize,
        stages: &mut Stages<E>,
    ) {
        let bp = comptime!(self.bp);
        let interval_row = attended.interval_row();
        let stage = tile % comptime!(bp.stages);
        // Number of earlier fills of the stage.
        let turn = tile / comptime!(bp.stages);
        if turn > 0 {
            ring.wait_empty(stage, turn - 1);
        }
        self.start_at::<E>(source, attended, interval_row, tile, stages);
        if comptime!(bp.notes_columns()) && (UNIT_POS as usize) < comptime!(bp.key_tile) {
            // Releases the words that this unit has stored, which the arrival of the copies does not.
            ring.arrive_stored(stage);
        }
        ring.arrive_copied(stage);
    }
}

/// The last column that holds a key, or `column` if it comes before.
#[cube]
fn within(column: usize, keys: &TileKeys) -> usize {
    min(column, max(keys.total, 1usize) - 1)
}

/// This unit's part of the copies of the bits of a cube's steps: the bits of one query.
#[derive(CubeType, Clone, Copy)]
struct BitCopies {
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
    fn new<E: Float>(source: &KeySource, attended: &AttendedKeys, stages: &Stages<E>) -> BitCopies {
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

    /// Starts the copies of key tile `tile`'s step (key block `block` if not gathered), unless all queries see all of
    /// it.
    fn start(&self, keys: &TileKeys, tile: usize, block: u32, #[comptime] bp: MmaBlueprint) {
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

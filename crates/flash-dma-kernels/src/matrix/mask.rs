//! The tile plan as the tensor-core kernels read it.
//!
//! The arguments of a kernel with a plan, [`PlannedKeys`](crate::matrix::args::PlannedKeys):
//!
//! - `bits`: the bits of the plan, a pair of words for a query and a key block.
//! - `counts`: [`TILE_LIST_HEADER`](crate::pattern::layout::TILE_LIST_HEADER) words, the key blocks and the queries of
//!   the bits, 1 if a watched value is not finite, and where the gathered bits begin in a list; followed by
//!   `[mask batch, mask heads, tiles, TILE_LIST_WORDS]`: the columns that all queries of a tile see, all its columns, 1
//!   if they are gathered, and, at index `n`, the tile whose list is the `n`-th longest.
//! - `list` `[mask batch, mask heads, tiles, capacity]`: the content of a tile's columns. Either key blocks of 64
//!   columns each, the blocks that all its queries see first; or, if gathered, one key each, again the keys that all
//!   see first, and, from the offset in the header on, the bits of these columns, `[steps of 64 columns, queries, 2]`,
//!   causal masking included.
//!
//! A key tile is a step of 64 columns, or one of its halves.

use crate::matrix::args::KeySource;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::query_tile::broadcast_row;
use crate::matrix::rows::{CubeTile, RowPair, TileRow};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::pattern::layout::{KEY_BLOCK, first_bits};
use cubecl::prelude::*;

/// Location of the bits of a cube's rows. Strides of 0 broadcast.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct MaskRows {
    pub base: usize,
    pub block_step: usize,
    pub query_step: usize,
    /// Offset in the list of the blocks or, if gathered, of the bits; and the first query of the tile.
    pub list: usize,
    pub first_query: usize,
    /// The first key that the first query of the tile does not see by its position.
    pub first_end: u32,
    pub gathered: bool,
    /// True if a boundary step may hold values that are not finite.
    pub not_finite: bool,
}

#[cube]
impl MaskRows {
    /// Only read if `bp.pattern.is_planned()`, except for `not_finite`.
    pub(crate) fn new(source: &KeySource, own: &CubeTile, keys: &TileKeys) -> MaskRows {
        let bp = comptime!(own.bp);
        let mut rows = MaskRows {
            base: 0usize,
            block_step: 0usize,
            query_step: 0usize,
            list: keys.list,
            first_query: own.tile * comptime!(bp.queries()),
            first_end: 0u32,
            gathered: keys.gathered,
            not_finite: true,
        };
        if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            let list = &plan.list;
            let counts = &plan.counts;
            let (blocks, queries) = (counts[0] as usize, counts[1] as usize);
            let (batch, head) = broadcast_row(list, own);
            rows.base = (batch * list.shape(1) + head) * blocks * queries;
            if blocks > 1 {
                rows.block_step = queries;
            }
            if queries > 1 {
                rows.query_step = 1usize;
            }
            if keys.gathered {
                rows.list += counts[3] as usize;
            }
            rows.not_finite = counts[2] == 1u32;
            let first = TileRow::new(0usize, own);
            rows.first_end = max(first.position + 1, 0i32) as u32;
        }
        rows
    }

    /// The columns of key tile `tile` that a row sees, one bit per column, from the copies of
    /// [`KeyCopies`](crate::matrix::key_stream::KeyCopies); causal masking included. For half a step, the first word.
    pub(crate) fn words<E: Float>(
        &self,
        stages: &Stages<E>,
        row: &TileRow,
        tile: usize,
        #[comptime] bp: MmaBlueprint,
    ) -> Vector<u32, Const<2>> {
        let stage = tile % comptime!(bp.stages) * comptime!(bp.stage_intervals());
        let mut seen = stages.intervals[stage + row.query - self.first_query];
        if !self.gathered {
            let block = stages.intervals[stage + comptime!(bp.queries())].extract(0usize);
            // Most blocks lie before the last key that any query of the tile may see.
            if block * 64 + 64 > self.first_end {
                seen = until(seen, row, block as usize);
            }
        }
        if comptime!(bp.key_tile < KEY_BLOCK) {
            let half = select(tile % 2 == 1, seen.extract(1usize), seen.extract(0usize));
            seen.insert(0usize, half);
        }
        seen
    }

    /// [`words`](Self::words) of a lane's two rows; all ones without a plan and for a full tile, whose bits are not
    /// copied.
    pub(crate) fn words_of_pair<E: Float>(
        &self,
        stages: &Stages<E>,
        rows: &RowPair,
        tile: usize,
        boundary: bool,
        #[comptime] bp: MmaBlueprint,
    ) -> SeenPair {
        let mut upper = Vector::<u32, Const<2>>::new(u32::new(comptime!(u32::MAX as i64)));
        let mut lower = Vector::<u32, Const<2>>::new(u32::new(comptime!(u32::MAX as i64)));
        if comptime!(bp.pattern.is_planned()) {
            // The bits of a full tile were not copied.
            if boundary {
                upper = self.words::<E>(stages, &rows.upper, tile, bp);
                lower = self.words::<E>(stages, &rows.lower, tile, bp);
            }
        }
        SeenPair { upper, lower }
    }

    /// True if a row sees a column, read from global memory.
    pub(crate) fn sees(
        &self,
        source: &KeySource,
        own: &CubeTile,
        row: &TileRow,
        column: usize,
    ) -> bool {
        let plan = source.plan.as_ref().unwrap();
        let bits = &plan.bits;
        let list = &plan.list;
        let step = column / KEY_BLOCK;
        let mut seen = Vector::<u32, Const<2>>::new(0u32);
        if self.gathered {
            let at =
                self.list + (step * comptime!(own.bp.queries()) + row.query - self.first_query) * 2;
            seen.insert(0usize, list[at]);
            seen.insert(1usize, list[at + 1]);
        } else {
            let block = list[self.list + step] as usize;
            let query = min(row.query, own.q_len - 1);
            let words = bits[self.base + block * self.block_step + query * self.query_step];
            seen = until(words, row, block);
        }
        let second = column % KEY_BLOCK >= 32;
        let word = select(second, seen.extract(1usize), seen.extract(0usize));
        (word >> (column % 32) as u32) & 1u32 == 1u32
    }
}

/// The columns of a key tile that the two rows of a lane see, one bit per column.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SeenPair {
    pub upper: Vector<u32, Const<2>>,
    pub lower: Vector<u32, Const<2>>,
}

/// A row's bits of key block `block` after causal masking.
#[cube]
pub(crate) fn until(
    words: Vector<u32, Const<2>>,
    row: &TileRow,
    block: usize,
) -> Vector<u32, Const<2>> {
    let end = row.position + 1 - (block * KEY_BLOCK) as i32;
    let mut seen = Vector::<u32, Const<2>>::new(0u32);
    seen.insert(0usize, words.extract(0usize) & first_bits(end));
    seen.insert(1usize, words.extract(1usize) & first_bits(end - 32));
    seen
}

#[cube]
pub(crate) fn step_of(tile: usize, #[comptime] bp: MmaBlueprint) -> usize {
    tile / comptime!(KEY_BLOCK / bp.key_tile)
}

/// True if this lane sees column `first + 2 * quad` of a key block; `seen` are its row's words.
#[cube]
pub(crate) fn is_set(seen: Vector<u32, Const<2>>, #[comptime] first: usize) -> bool {
    // Only the constant part of this lane's columns remains.
    let own = seen.extract(comptime!(first / 32)) >> (UNIT_POS_X % 4 * 2);
    own & comptime!(1u32 << (first % 32)) != 0u32
}

/// The logits of an accumulator, see [`tile_logits`](crate::matrix::logits::tile_logits), with -inf where hidden.
#[cube]
pub(crate) fn hide_masked<N: Size>(
    logits: &Vector<f32, N>,
    seen: &SeenPair,
    #[comptime] bp: MmaBlueprint,
) -> Vector<f32, N> {
    let none = f32::new(f32::NEG_INFINITY);
    let mut hidden = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let column = comptime!(n * 8 + e);
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            hidden.insert(
                at0,
                select(is_set(seen.upper, column), logits.extract(at0), none),
            );
            hidden.insert(
                at1,
                select(is_set(seen.lower, column), logits.extract(at1), none),
            );
        }
    }
    hidden
}

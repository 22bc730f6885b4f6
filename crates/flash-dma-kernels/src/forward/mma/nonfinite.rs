//! NaN and infinite values of boundary keys.
//!
//! A product over a tile multiplies the value of a key that a row does not select by a probability of
//! zero, and `0 * NaN` is NaN: it would leak into rows that never attend to the key. On tiles where
//! some pair is not selected the values are therefore looked at first. Keys with a value that is not
//! finite are taken out of the tile, and added back pair by pair, to the rows that select them. Full
//! tiles need none of this: there every row selects every key.

use super::blueprint::MmaBlueprint;
use super::logits::{LogitScale, score, sees};
use super::rows::{TileKeys, TileRow};
use super::stream::{RowAddress, Stages};
use crate::tile::mma::{Accumulators, Chunk, ex2, quad_sum, set, swizzle};
use cubecl::prelude::*;

/// Marks in shared memory: `[key_tile]` whether the slot's values are not all finite, then whether any
/// slot is marked.
#[derive(CubeType)]
pub(super) struct Marks {
    marks: Shared<[u32]>,
}

#[cube]
impl Marks {
    /// No slot is marked. The caller synchronises before the first use.
    pub(super) fn new(#[comptime] bp: MmaBlueprint) -> Marks {
        let mut marks = Shared::<[u32]>::new_slice(comptime!(bp.key_tile + 1));
        if (UNIT_POS as usize) < comptime!(bp.key_tile + 1) {
            marks[UNIT_POS as usize] = 0u32;
        }
        Marks { marks }
    }

    /// Marks the slots of the stage whose values are not finite and zeroes them; says whether there
    /// are any. All units must take part.
    pub(super) fn take_out<E: Float>(
        &mut self,
        stages: &mut Stages<E>,
        tile: usize,
        #[comptime] bp: MmaBlueprint,
    ) -> bool {
        let chunks = comptime!(bp.chunks());
        let base = tile % comptime!(bp.stages) * comptime!(bp.key_tile * bp.chunks());
        #[unroll]
        for c in 0..comptime!(bp.copies()) {
            let at = UNIT_POS as usize + c * comptime!(bp.units());
            let row = at / chunks;
            if row < comptime!(bp.key_tile) {
                let values = Vector::<f32, Const<8>>::cast_from(
                    stages.v[base + swizzle(row, at % chunks, chunks)],
                );
                // 0 times NaN or an infinity is NaN.
                let mut sum = 0.0f32;
                #[unroll]
                for e in 0..8usize {
                    sum += values.extract(e) * 0.0f32;
                }
                if sum != 0.0f32 {
                    self.marks[row] = 1u32;
                    self.marks[comptime!(bp.key_tile)] = 1u32;
                }
            }
        }
        sync_cube();
        let any = self.marks[comptime!(bp.key_tile)] == 1u32;
        if any {
            #[unroll]
            for c in 0..comptime!(bp.copies()) {
                let at = UNIT_POS as usize + c * comptime!(bp.units());
                let row = at / chunks;
                if row < comptime!(bp.key_tile) && self.marks[row] == 1u32 {
                    stages.v[base + swizzle(row, at % chunks, chunks)] =
                        Vector::new(E::from_int(0));
                }
            }
            sync_cube();
        }
        any
    }

    /// Adds `p v` of every marked slot to the rows that select it, and clears the marks. All units
    /// must take part. `max0` and `max1` are the references of the two rows' probabilities.
    pub(super) fn add_back<E: Float, NA: Size, NC: Size>(
        &mut self,
        k: &Tensor<Chunk<E>>,
        v: &Tensor<Chunk<E>>,
        list: &Tensor<u32>,
        k_rows: &RowAddress,
        v_rows: &RowAddress,
        keys: &TileKeys,
        stages: &Stages<E>,
        tile: usize,
        q: &Sequence<Array<Vector<E, NA>>>,
        row0: &TileRow,
        row1: &TileRow,
        max0: f32,
        max1: f32,
        scale: &LogitScale,
        k_len: usize,
        acc: &mut Accumulators<NC>,
        #[comptime] bp: MmaBlueprint,
    ) {
        let quad = UNIT_POS_X as usize % 4;
        for slot in 0..comptime!(bp.key_tile) {
            if self.marks[slot] == 1u32 {
                let mut key = tile * comptime!(bp.key_tile) + slot;
                if comptime!(bp.sparse) {
                    key = list[keys.list + key] as usize;
                }
                // The logit of each row again, by scalar products: a quad holds the whole row of Q.
                let mut dot0 = 0.0f32;
                let mut dot1 = 0.0f32;
                #[unroll]
                for c in 0..comptime!(bp.chunks()) {
                    let pair = pick::<E>(k[k_rows.base + key * k_rows.stride + c], quad);
                    let upper =
                        Vector::<f32, NA>::cast_from(q[comptime!(c / 2)][comptime!(c % 2 * 2)]);
                    let lower =
                        Vector::<f32, NA>::cast_from(q[comptime!(c / 2)][comptime!(c % 2 * 2 + 1)]);
                    #[unroll]
                    for e in 0..2usize {
                        dot0 += upper.extract(e) * pair.extract(e);
                        dot1 += lower.extract(e) * pair.extract(e);
                    }
                }
                let mut x0 = scale.apply(quad_sum(dot0), bp);
                let mut x1 = scale.apply(quad_sum(dot1), bp);
                if comptime!(bp.sparse) {
                    let z = score::<E>(stages, tile, slot, bp);
                    x0 += z;
                    x1 += z;
                }
                let see0 = sees::<E>(row0, stages, tile, slot, k_len, bp);
                let see1 = sees::<E>(row1, stages, tile, slot, k_len, bp);
                let p0 = ex2(x0 - max0);
                let p1 = ex2(x1 - max1);
                #[unroll]
                for c in 0..comptime!(bp.chunks()) {
                    let pair = pick::<E>(v[v_rows.base + key * v_rows.stride + c], quad);
                    let mut upper = acc[c][0];
                    let mut lower = acc[c][1];
                    #[unroll]
                    for e in 0..2usize {
                        if see0 {
                            upper.insert(e, upper.extract(e) + p0 * pair.extract(e));
                        }
                        if see1 {
                            lower.insert(e, lower.extract(e) + p1 * pair.extract(e));
                        }
                    }
                    set(&mut acc[c], 0usize, upper);
                    set(&mut acc[c], 1usize, lower);
                }
            }
        }
        sync_cube();
        if (UNIT_POS as usize) < comptime!(bp.key_tile + 1) {
            self.marks[UNIT_POS as usize] = 0u32;
        }
        sync_cube();
    }
}

/// Elements `2 quad` and `2 quad + 1` of a chunk. An index known only at run time would move the chunk
/// to local memory.
#[cube]
fn pick<E: Float>(chunk: Chunk<E>, quad: usize) -> Vector<f32, Const<2>> {
    let all = Vector::<f32, Const<8>>::cast_from(chunk);
    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
    #[unroll]
    for t in 0..4usize {
        #[unroll]
        for e in 0..2usize {
            if quad == t {
                pair.insert(e, all.extract(comptime!(t * 2 + e)));
            }
        }
    }
    pair
}

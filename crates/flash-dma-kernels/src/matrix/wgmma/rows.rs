//! Writes the rows of an accumulator, each of which lies across the four lanes of a quad.

use crate::finite::is_finite;
use crate::matrix::blueprint::{MmaBlueprint, RowStores};
use crate::matrix::fragment::quad_sum;
use crate::matrix::ptx::{global_address, shuffle_xor_word, value};
use cubecl::prelude::*;

/// The destination and factor of one of the two rows of a lane.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowToWrite {
    /// True if there is such a row; otherwise nothing is written.
    pub valid: bool,
    /// The row's index among rows of `head_dim` elements.
    pub row: usize,
    /// The factor of its elements.
    pub factor: f32,
    /// True if zeros are written.
    pub empty: bool,
}

/// How many times four segments a row has, and how many of them are left for the `n`-th four.
fn fours(bp: MmaBlueprint) -> usize {
    bp.segments().div_ceil(4)
}

fn segments_of(n: usize, bp: MmaBlueprint) -> usize {
    (bp.segments() - 4 * n).min(4)
}

#[cube]
impl RowToWrite {
    /// This lane's elements of the `n`-th four segments, as many as there are, of the `lower` row or the other.
    fn pairs<N: Size>(
        &self,
        acc: &Vector<f32, N>,
        #[comptime] n: usize,
        #[comptime] lower: usize,
        #[comptime] bp: MmaBlueprint,
    ) -> Array<Vector<f32, Const<2>>> {
        let mut pairs = Array::<Vector<f32, Const<2>>>::new(4usize);
        #[unroll]
        for i in 0..comptime!(segments_of(n, bp)) {
            let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
            #[unroll]
            for e in 0..2usize {
                let x: f32 = acc.extract(comptime!((n * 4 + i) * 4 + lower * 2 + e));
                pair.insert(e, select(self.empty, 0.0f32, x * self.factor));
            }
            pairs[i] = pair;
        }
        pairs
    }

    /// The index of the `i`-th pair that this lane stores of the `n`-th four segments.
    fn place(
        &self,
        #[comptime] n: usize,
        #[comptime] i: usize,
        #[comptime] bp: MmaBlueprint,
    ) -> usize {
        let first = self.row * comptime!(bp.head_dim / 2) + comptime!(n * 16);
        let quad = UNIT_POS_X as usize % 4;
        match comptime!(bp.stores) {
            RowStores::Pairs => first + comptime!(i * 4) + quad,
            RowStores::Segments => first + quad * 4 + i,
        }
    }

    /// Stores the `n`-th four segments of the row, of each of which this lane holds a pair. All lanes take part.
    fn store<O: Float>(
        &self,
        to: &mut [Vector<O, Const<2>>],
        pairs: &Array<Vector<O, Const<2>>>,
        #[comptime] n: usize,
        #[comptime] bp: MmaBlueprint,
    ) {
        match comptime!(bp.stores) {
            RowStores::Pairs => {
                if self.valid {
                    #[unroll]
                    for i in 0..comptime!(segments_of(n, bp)) {
                        to[self.place(n, i, bp)] = pairs[i];
                    }
                }
            }
            RowStores::Segments => {
                let mut words = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    words[i] = u32::reinterpret(pairs[i]);
                }
                collect_segment(&mut words);
                if self.valid {
                    let at = self.place(n, 0usize, bp);
                    store_segment(global_address(&to[at..at + 1]), &words);
                }
            }
        }
    }
}

/// Writes the `lower` row of an accumulator or the other. All lanes of the warp take part.
#[cube]
pub(crate) fn write_row<O: Float, N: Size>(
    to: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    row: &RowToWrite,
    #[comptime] lower: usize,
    #[comptime] bp: MmaBlueprint,
) {
    #[unroll]
    for n in 0..comptime!(fours(bp)) {
        let pairs = row.pairs::<N>(acc, n, lower, bp);
        let mut rounded = Array::<Vector<O, Const<2>>>::new(4usize);
        #[unroll]
        for i in 0..comptime!(segments_of(n, bp)) {
            rounded[i] = Vector::cast_from(pairs[i]);
        }
        row.store::<O>(to, &rounded, n, bp);
    }
}

/// [`write_row`], and the row's rounding error to `residual`: zeros if an element is not finite.
#[cube]
pub(crate) fn write_row_exactly<O: Float, N: Size>(
    to: &mut [Vector<O, Const<2>>],
    residual: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    row: &RowToWrite,
    #[comptime] lower: usize,
    #[comptime] bp: MmaBlueprint,
) {
    let mut all = 0.0f32;
    #[unroll]
    for n in 0..comptime!(fours(bp)) {
        let pairs = row.pairs::<N>(acc, n, lower, bp);
        let mut rounded = Array::<Vector<O, Const<2>>>::new(4usize);
        let mut losses = Array::<Vector<O, Const<2>>>::new(4usize);
        #[unroll]
        for i in 0..comptime!(segments_of(n, bp)) {
            rounded[i] = Vector::cast_from(pairs[i]);
            let loss = pairs[i] - Vector::cast_from(rounded[i]);
            losses[i] = Vector::cast_from(loss);
            all += loss.extract(0usize) + loss.extract(1usize);
        }
        row.store::<O>(to, &rounded, n, bp);
        row.store::<O>(residual, &losses, n, bp);
    }
    // Rare, and expensive if tested for each element.
    let finite = is_finite(quad_sum(all));
    if !finite && row.valid {
        #[unroll]
        for n in 0..comptime!(fours(bp)) {
            #[unroll]
            for i in 0..comptime!(segments_of(n, bp)) {
                // Only elements that this lane has stored itself: the order of the stores of two lanes is undefined.
                residual[row.place(n, i, bp)] = Vector::new(O::from_int(0));
            }
        }
    }
}

/// Turns this lane's words of four segments, each spread over the quad, into those of the segment of the lane's index.
#[cube]
pub(crate) fn collect_segment(words: &mut Array<u32>) {
    let quad = UNIT_POS_X % 4;
    #[unroll]
    for step in 0..2usize {
        let mask = comptime!(1 << step);
        let high = quad & mask != 0u32;
        #[unroll]
        for pair in 0..2usize {
            let (a, b) = comptime!(if step == 0 {
                (2 * pair, 2 * pair + 1)
            } else {
                (pair, pair + 2)
            });
            let (low_word, high_word) = (value::<u32>(words[a]), value::<u32>(words[b]));
            let other = shuffle_xor_word(select(high, low_word, high_word), mask);
            words[a] = select(high, other, low_word);
            words[b] = select(high, high_word, other);
        }
    }
}

/// Stores 16 bytes at an address in global memory.
#[cube]
pub(crate) fn store_segment(address: u64, words: &Array<u32>) {
    gpu_asm!(
        "st.global.v4.b32 [{}], {{{}, {}, {}, {}}};",
        in(_) value::<u64>(address),
        in(_) value::<u32>(words[0]),
        in(_) value::<u32>(words[1]),
        in(_) value::<u32>(words[2]),
        in(_) value::<u32>(words[3]),
        options(explicit_mem, writes_address_space global)
    );
}

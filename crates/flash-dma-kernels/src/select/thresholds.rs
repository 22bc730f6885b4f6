//! The kernel that finds the keys attended to at the beginning of every block of positions.

use crate::select::blueprint::BlocksBlueprint;
use crate::select::digits::{BINS, DIGIT, count, find_digit, shared_address};
use crate::select::sort::{NEVER, sort_key};
use cubecl::prelude::*;

/// Vectors of scores that a unit reads before it uses the first of them, so that the reads overlap.
pub(crate) const READS: usize = 4;

/// Words of a threshold: sort key, index, live keys.
pub(crate) const THRESHOLD: usize = 3;
/// Keys that a row may have: two digits of index.
pub(crate) const MAX_KEYS: usize = 1 << (2 * DIGIT);

/// The worst of the `window` best among the keys before an edge between blocks.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Threshold {
    /// Its sort key; [`NEVER`] if fewer than `window` of those keys are ever attended to.
    pub key: u32,
    /// Its index: keys of the same score that come later are not attended to.
    pub last: u32,
    /// Keys attended to at the edge.
    pub live: u32,
}

#[cube]
impl Threshold {
    pub(crate) fn read(thresholds: &[u32], row_edge: usize) -> Threshold {
        let at = row_edge * THRESHOLD;
        Threshold {
            key: thresholds[at],
            last: thresholds[at + 1],
            live: thresholds[at + 2],
        }
    }

    /// True if a key, which must not be [`NEVER`], is the threshold or better.
    pub(crate) fn keeps(&self, key: u32, index: u32) -> bool {
        key > self.key || (key == self.key && index <= self.last)
    }
}

/// Finds the threshold at every edge `0, block, 2 * block, .., n` of every row: a radix selection over
/// the keys before it, by digits of the sort key and, where a tie is cut, of the index.
///
/// One cube per (row, edge). `scores` is `[batch, kv_heads, n]` with any strides and a contiguous last axis, of vectors
/// that divide `n` and `block`; `thresholds` is `[rows, edges]` of [`Threshold`], overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn thresholds_kernel<S: Size>(
    scores: &Tensor<Vector<f32, S>>,
    thresholds: &mut [u32],
    rows: u32,
    n: u32,
    window: u32,
    #[comptime] bp: BlocksBlueprint,
) {
    let edges = (n.div_ceil(comptime!(bp.block as u32)) + 1u32) as usize;
    let row = CUBE_POS / edges;
    if row < rows as usize {
        // The last edges have the most keys before them, so they go first.
        let edge = edges - 1 - CUBE_POS % edges;
        let len = min(edge as u32 * comptime!(bp.block as u32), n);
        let from = row_start::<S>(scores, row);
        let counts = Shared::<[Atomic<u32>]>::new_slice(BINS);
        let mut totals = Shared::<[u32]>::new_slice(bp.team.planes);
        let mut found = Shared::<[u32]>::new_slice(3usize);
        let mut bin = UNIT_POS as usize;
        while bin < BINS {
            counts[bin].store(0u32);
            bin += comptime!(bp.team.units());
        }
        sync_cube();

        // Acts as if the row began with keys of score -inf, so that there is a `window`-th best.
        let missing = window - min(window, len);
        let mut wanted = window;
        let mut equal = 0u32;
        let mut key = 0u32;
        for pass in 0..3u32 {
            let shift = select(pass == 0u32, 21u32, select(pass == 1u32, 10u32, 0u32));
            let bits = Bits {
                shift,
                digit: select(pass == 2u32, 0x3FFu32, 0x7FFu32),
                above: select(
                    pass == 0u32,
                    0u32,
                    select(pass == 1u32, 0xFFE0_0000u32, 0xFFFF_FC00u32),
                ),
            };
            let sought = Sought { known: key, key };
            count_digits::<S>(scores, from, len, &counts, &sought, &bits, false, bp);
            let lowest = select(key == NEVER, missing, 0u32);
            let digit = find_digit(&counts, &mut totals, &mut found, wanted, lowest, bp.team);
            key += digit.value << shift;
            wanted = digit.wanted;
            equal = digit.count;
        }
        // All keys better than -inf, and none of the `wanted` others.
        let mut live = window;
        if key == NEVER {
            live = window - wanted;
        }
        let mut last = len - min(len, 1u32);
        if key != NEVER && wanted < equal {
            // Only the first of the equal keys are kept: finds the last of these, by ascending index.
            let mut index = 0u32;
            for pass in 0..2u32 {
                let bits = Bits {
                    shift: select(pass == 0u32, comptime!(DIGIT), 0u32),
                    digit: 0x7FFu32,
                    above: select(pass == 0u32, 0u32, comptime!(!(BINS as u32 - 1))),
                };
                let sought = Sought { known: index, key };
                count_digits::<S>(scores, from, len, &counts, &sought, &bits, true, bp);
                let digit = find_digit(&counts, &mut totals, &mut found, wanted, 0u32, bp.team);
                wanted = digit.wanted;
                index += (comptime!(BINS as u32 - 1) - digit.value) << bits.shift;
            }
            last = index;
        }
        if UNIT_POS == 0 {
            let to = (row * edges + edge) * THRESHOLD;
            thresholds[to] = key;
            thresholds[to + 1] = last;
            thresholds[to + 2] = live;
        }
    }
}

/// The first vector of a row of scores.
#[cube]
pub(crate) fn row_start<S: Size>(scores: &Tensor<Vector<f32, S>>, row: usize) -> usize {
    let size = scores.vector_size().comptime();
    let heads = scores.shape(1);
    ((row / heads) * scores.stride(0) + (row % heads) * scores.stride(1)) / size
}

/// The bits of a word that form the digit, and the bits above it.
#[derive(CubeType, Clone, Copy)]
struct Bits {
    shift: u32,
    /// The mask of the digit, after the shift.
    digit: u32,
    /// The mask of the bits above the digit.
    above: u32,
}

/// The bits that are known of what [`count_digits`] looks for, and the sort key.
#[derive(CubeType, Clone, Copy)]
struct Sought {
    known: u32,
    key: u32,
}

/// Counts the digits of the first `len` sort keys that agree with what is known above the digit; or, if
/// `by_index`, the inverted digits of the indices of those equal to the key.
#[cube]
fn count_digits<S: Size>(
    scores: &Tensor<Vector<f32, S>>,
    from: usize,
    len: u32,
    counts: &Shared<[Atomic<u32>]>,
    sought: &Sought,
    bits: &Bits,
    #[comptime] by_index: bool,
    #[comptime] bp: BlocksBlueprint,
) {
    let size = scores.vector_size().comptime();
    let units = comptime!(bp.team.units() as u32);
    let vectors = len / comptime!(size as u32);
    let mut first_count = 0u32;
    if comptime!(bp.ptx) {
        first_count = shared_address::<Atomic<u32>>(&counts[0..1]);
    }
    let mut at = UNIT_POS;
    while at < vectors {
        let mut read = Array::<Vector<f32, S>>::new(READS);
        #[unroll]
        for r in 0..READS {
            let vector = at + comptime!(r as u32) * units;
            read[r] = scores[from + min(vector, vectors - 1u32) as usize];
        }
        #[unroll]
        for r in 0..READS {
            let vector = at + comptime!(r as u32) * units;
            if vector < vectors {
                #[unroll]
                for e in 0..size {
                    let own = sort_key(read[r].extract(e));
                    let mut counted = own & bits.above == sought.known;
                    let mut digit = (own >> bits.shift) & bits.digit;
                    if comptime!(by_index) {
                        let index = vector * comptime!(size as u32) + comptime!(e as u32);
                        counted = own == sought.key && index & bits.above == sought.known;
                        digit = comptime!(BINS as u32 - 1) - ((index >> bits.shift) & bits.digit);
                    }
                    if counted {
                        count(counts, first_count, digit, bp.ptx);
                    }
                }
            }
        }
        at += comptime!(READS as u32) * units;
    }
}

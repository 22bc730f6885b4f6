//! The kernel that writes the intervals, given the thresholds at the edges of blocks of positions.

use crate::select::blueprint::BlocksBlueprint;
use crate::select::sort::{NEVER, sort_key};
use crate::select::thresholds::{READS, Threshold, row_start};
use cubecl::prelude::*;

/// Newborns that are compared with a key between two tests for the end of its search.
const STRIDE: usize = 32;

/// Sizes of a launch of [`evictions_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Evictions {
    pub rows: u32,
    pub n: u32,
    pub best: u32,
    /// Positions that a key lives beyond its rank's interval, at most `n`.
    pub recent: u32,
}

/// The shared memory of a cube.
#[derive(CubeType)]
struct Keys {
    /// Sort keys of the keys born in the block, by position; [`NEVER`] past the row.
    born: Shared<[u32]>,
    /// The sort keys of `born`, four at a time.
    born4: Shared<[Vector<u32, Const<4>>]>,
    /// Sort keys and indices of the older keys that the block's newborns evict, in any order.
    old: Shared<[Vector<u32, Const<2>>]>,
    /// Positions in the block of newborns that are evicted before it ends, in any order.
    young: Shared<[u32]>,
    lens: Shared<[Atomic<u32>]>,
}

/// Writes the interval of every key that is evicted at a position of the block, and of every key of the block that
/// never ranks among the best or is never evicted.
///
/// A key is evicted by the newborn that is the `best`-th better key. Keys better than the threshold at the block's end
/// outlive the block, and keys worse than the threshold at its beginning do not count in it: this leaves the block's
/// newborns and at most as many older keys as the block has positions. Each of them counts the better newborns in order
/// of position.
///
/// One cube per (row, block). `scores` is as in [`thresholds_kernel`](crate::select::thresholds::thresholds_kernel),
/// which made `thresholds`; `intervals` is contiguous `[rows, n, 2]`, overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn evictions_kernel<S: Size>(
    scores: &Tensor<Vector<f32, S>>,
    thresholds: &[u32],
    intervals: &mut [u32],
    sizes: &Evictions,
    #[comptime] bp: BlocksBlueprint,
) {
    let n = sizes.n;
    let blocks = n.div_ceil(comptime!(bp.block as u32)) as usize;
    let row = CUBE_POS / blocks;
    if row < sizes.rows as usize {
        let block = blocks - 1 - CUBE_POS % blocks;
        let row_edge = row * (blocks + 1);
        let before = Threshold::read(thresholds, row_edge + block);
        let after = Threshold::read(thresholds, row_edge + block + 1);
        let at_end = Threshold::read(thresholds, row_edge + blocks);
        let start = block as u32 * comptime!(bp.block as u32);
        let from = row_start::<S>(scores, row);
        let row_base = row * n as usize;

        let mut keys = Keys {
            born: Shared::<[u32]>::new_slice(bp.block),
            born4: Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
                comptime!(bp.block / 4),
                128usize,
            ),
            old: Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(bp.block, 128usize),
            young: Shared::<[u32]>::new_slice(bp.block),
            lens: Shared::<[Atomic<u32>]>::new_slice(2usize),
        };
        if UNIT_POS == 0 {
            keys.lens[0].store(0u32);
            keys.lens[1].store(0u32);
        }
        load_newborns::<S>(scores, from, start, n, &mut keys, bp);
        sync_cube();
        let mut four = UNIT_POS as usize;
        while four < comptime!(bp.block / 4) {
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for e in 0..4usize {
                vector.insert(e, keys.born[four * 4 + e]);
            }
            keys.born4[four] = vector;
            four += comptime!(bp.team.units());
        }

        let mut local = UNIT_POS;
        while local < comptime!(bp.block as u32) {
            let index = start + local;
            let key = keys.born[local as usize];
            if index < n {
                let is_best = key != NEVER && before.keeps(key, index);
                let is_kept = at_end.keeps(key, index);
                if key == NEVER {
                    write(intervals, row_base, index, index);
                } else if !is_best || is_kept {
                    let end = select(is_best, n, index);
                    write(intervals, row_base, index, sizes.until(end));
                } else if !after.keeps(key, index) {
                    let at = keys.lens[1].fetch_add(1u32);
                    keys.young[at as usize] = local;
                }
            }
            local += comptime!(bp.team.units() as u32);
        }
        if after.key != NEVER && (before.key != after.key || before.last != after.last) {
            gather_old::<S>(scores, from, start, &before, &after, &mut keys, bp);
        }
        sync_cube();

        let old = min(keys.lens[0].load(), comptime!(bp.block as u32)) as usize;
        let young = keys.lens[1].load() as usize;
        // Keys that the block's newborns must evict before a key at the threshold is evicted.
        let free = sizes.best - before.live;
        let mut i = UNIT_POS as usize;
        while i < old {
            let (key, index) = (keys.old[i].extract(0usize), keys.old[i].extract(1usize));
            let mut wanted = free + 1u32;
            for other in 0..old {
                let other = keys.old[other];
                let is_worse = other.extract(0usize) < key
                    || (other.extract(0usize) == key && other.extract(1usize) > index);
                wanted += u32::cast_from(is_worse);
            }
            let position = find_better(&keys, key, 0u32, wanted, bp);
            write(intervals, row_base, index, sizes.until(start + position));
            i += comptime!(bp.team.units());
        }
        let mut i = UNIT_POS as usize;
        while i < young {
            let local = keys.young[i];
            let key = keys.born[local as usize];
            let mut wanted = free;
            for other in 0..old {
                wanted += u32::cast_from(keys.old[other].extract(0usize) < key);
            }
            let position = find_better(&keys, key, local, wanted, bp);
            let index = start + local;
            // Evicted before it was seen: never attended to for its rank.
            let end = sizes.until(start + max(position, local));
            write(intervals, row_base, index, end);
            i += comptime!(bp.team.units());
        }
    }
}

#[cube]
impl Evictions {
    fn until(&self, end: u32) -> u32 {
        min(end + self.recent, self.n)
    }
}

#[cube]
fn write(intervals: &mut [u32], row_base: usize, index: u32, end: u32) {
    let to = (row_base + index as usize) * 2;
    intervals[to] = index;
    intervals[to + 1] = end;
}

/// Fills `keys.born`. The caller synchronises.
#[cube]
fn load_newborns<S: Size>(
    scores: &Tensor<Vector<f32, S>>,
    from: usize,
    start: u32,
    n: u32,
    keys: &mut Keys,
    #[comptime] bp: BlocksBlueprint,
) {
    let size = scores.vector_size().comptime();
    let mut vector = UNIT_POS as usize;
    while vector < comptime!(bp.block / size) {
        let first = start + (vector * size) as u32;
        let read = scores
            [from + (min(first, n - comptime!(size as u32)) / comptime!(size as u32)) as usize];
        #[unroll]
        for e in 0..size {
            let key = sort_key(read.extract(e));
            keys.born[vector * size + e] = select(first < n, key, comptime!(NEVER));
        }
        vector += comptime!(bp.team.units());
    }
}

/// Fills `keys.old`: keys before `start` attended to there, but not at the block's end. The caller synchronises.
#[cube]
fn gather_old<S: Size>(
    scores: &Tensor<Vector<f32, S>>,
    from: usize,
    start: u32,
    before: &Threshold,
    after: &Threshold,
    keys: &mut Keys,
    #[comptime] bp: BlocksBlueprint,
) {
    let size = scores.vector_size().comptime();
    let units = comptime!(bp.team.units() as u32);
    let vectors = start / comptime!(size as u32);
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
                    let key = sort_key(read[r].extract(e));
                    // Most keys are worse.
                    if key >= before.key && key <= after.key && key != NEVER {
                        let index = vector * comptime!(size as u32) + comptime!(e as u32);
                        if before.keeps(key, index) && !after.keeps(key, index) {
                            let at = keys.lens[0].fetch_add(1u32);
                            if at < comptime!(bp.block as u32) {
                                let mut entry = Vector::<u32, Const<2>>::new(key);
                                entry.insert(1usize, index);
                                keys.old[at as usize] = entry;
                            }
                        }
                    }
                }
            }
        }
        at += comptime!(READS as u32) * units;
    }
}

/// The position in the block of the `wanted`-th newborn, from 1, that is better than a key; there must be that many.
/// `local` is the key's own position, or 0 if it is older than the block: equal newborns before it are better.
#[cube]
fn find_better(
    keys: &Keys,
    key: u32,
    local: u32,
    wanted: u32,
    #[comptime] bp: BlocksBlueprint,
) -> u32 {
    let strides = comptime!(bp.block / STRIDE);
    let own = local as usize / STRIDE;
    let mut ties = 0u32;
    for k in own * STRIDE..local as usize {
        ties += u32::cast_from(keys.born[k] == key);
    }
    let mut rest = wanted;
    let mut stride = 0usize;
    let mut searching = true;
    while searching {
        // In whole strides before its own, equal keys are better: compares with the next lower key.
        let bar = select(stride < own, key - 1u32, key);
        let mut better = select(stride == own, ties, 0u32);
        #[unroll]
        for v in 0..comptime!(STRIDE / 4) {
            let four = keys.born4[stride * comptime!(STRIDE / 4) + v];
            #[unroll]
            for e in 0..4usize {
                better += u32::cast_from(four.extract(e) > bar);
            }
        }
        if better >= rest {
            searching = false;
        } else {
            rest -= better;
            stride += 1;
            searching = stride < strides;
        }
    }
    let mut position = (stride * STRIDE) as u32;
    while rest > 0u32 && position < comptime!(bp.block as u32) {
        let bar = select(position < local, key - 1u32, key);
        rest -= u32::cast_from(keys.born[position as usize] > bar);
        position += 1u32;
    }
    position - 1u32
}

//! Kernels that find, for every key, the `window`-th smallest index among the better keys.
//!
//! The rank order is a permutation of `0..n`. A wavelet tree over it answers such prefix quantiles:
//! its root holds the indices in rank order; a node's children hold the node's indices by their next
//! most significant digit, in unchanged order. Because the order is a permutation, the node of the
//! indices with high digits `p` begins at position `p << bits`, where `bits` counts the digits' bits
//! below. The tree is built one level at a time and every query descends as it is built, so only two
//! levels exist at a time. A level's digit is the lowest `width` bits of `index >> shift`.

use crate::select::sort::NEVER;
use cubecl::prelude::*;

/// Elements whose digits are counted together; also the size of the nodes at which the descent ends.
pub(crate) const RUN: u32 = 64;
/// Elements that one unit of [`count_digits_kernel`] counts.
pub(crate) const SPAN: u32 = 16 * RUN;

/// Counts, for every digit value `d`, the elements of digit at most `d`.
///
/// One unit per (row, span, digit value), the digit value fastest. `sequence` is `[rows, n]`. Overwrites `in_span`
/// `[rows, spans * SPAN / RUN, 1 << width]` with the counts from the start of the span to the start of the run, and
/// `spans_out` `[rows, spans, 1 << width]` with the counts of the whole span.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn count_digits_kernel(
    sequence: &[u32],
    in_span: &mut [u32],
    spans_out: &mut [u32],
    rows: u32,
    n: u32,
    shift: u32,
    width: u32,
) {
    let values = 1u32 << width;
    let spans = n.div_ceil(SPAN);
    let value = (ABSOLUTE_POS % values as usize) as u32;
    let row_span = ABSOLUTE_POS / values as usize;
    let row = row_span / spans as usize;
    if row < rows as usize {
        let start = (row_span % spans as usize) as u32 * SPAN;
        let base = row * n as usize;
        let mut count = 0u32;
        for run in 0..SPAN / RUN {
            let at = row_span * (SPAN / RUN) as usize + run as usize;
            in_span[at * values as usize + value as usize] = count;
            let first = min(start + run * RUN, n);
            let end = min(first + RUN, n);
            for i in first..end {
                if (sequence[base + i as usize] >> shift) % values <= value {
                    count += 1u32;
                }
            }
        }
        spans_out[row_span * values as usize + value as usize] = count;
    }
}

/// Converts the counts of spans, `[rows, spans, values]`, into counts from the start of the row to the start of the
/// span, in place. One unit per (row, digit value).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn scan_spans_kernel(spans: &mut [u32], rows: u32, span_count: u32, values: u32) {
    let row = ABSOLUTE_POS / values as usize;
    if row < rows as usize {
        let value = ABSOLUTE_POS % values as usize;
        let mut sum = 0u32;
        for span in 0..span_count {
            let at = (row * span_count as usize + span as usize) * values as usize + value;
            let count = spans[at];
            spans[at] = sum;
            sum += count;
        }
    }
}

/// A level of the tree, and its digit counts from the two kernels above.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Level {
    /// `[rows, n]`.
    pub sequence: Box<[u32]>,
    /// From the start of the span.
    pub in_span: Box<[u32]>,
    /// From the start of the row.
    pub spans: Box<[u32]>,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LevelSizes {
    pub rows: u32,
    pub n: u32,
    /// The digit's lowest bit, and its bits.
    pub shift: u32,
    pub width: u32,
}

/// The queries of the tree, one per rank; contiguous `[rows, n]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Queries {
    /// The high digits of the query's node.
    pub nodes: Box<[u32]>,
    /// The number of its better keys in the node, which are the node's first; 0 if there is nothing to find.
    pub candidates: Box<[u32]>,
    /// The rank by index of the better key that it looks for, from 1.
    pub wanted: Box<[u32]>,
}

#[cube]
impl Level {
    /// Elements of digit at most `value` of `values` before `run` of row `row` of `n` elements.
    fn counted(&self, row: usize, n: u32, values: u32, run: u32, value: u32) -> u32 {
        let row_span = row * n.div_ceil(SPAN) as usize + (run / (SPAN / RUN)) as usize;
        let at = row_span * (SPAN / RUN) as usize + (run % (SPAN / RUN)) as usize;
        self.in_span[at * values as usize + value as usize]
            + self.spans[row_span * values as usize + value as usize]
    }
}

/// Starts the queries: the key of rank `r` looks for the `window`-th smallest of its `r` better indices. One unit per
/// rank; `queries` are overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn start_queries_kernel(queries: &mut Queries, rows: u32, n: u32, window: u32) {
    if ABSOLUTE_POS < rows as usize * n as usize {
        let rank = (ABSOLUTE_POS % n as usize) as u32;
        queries.nodes[ABSOLUTE_POS] = 0u32;
        // Fewer better keys than the window: never evicted, no descent.
        queries.candidates[ABSOLUTE_POS] = select(rank >= window, rank, 0u32);
        queries.wanted[ABSOLUTE_POS] = window;
    }
}

/// Builds the next level of the tree and takes every query one level down.
///
/// One unit per position of the level, `[rows, n]`, which also owns the query of that rank. `next`, `[rows, n]`, is
/// overwritten with the level below, `queries` with their state in it.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn descend_kernel(
    level: &Level,
    next: &mut [u32],
    queries: &mut Queries,
    sizes: &LevelSizes,
) {
    let (rows, n, shift, width) = (sizes.rows, sizes.n, sizes.shift, sizes.width);
    let row = ABSOLUTE_POS / n as usize;
    if row < rows as usize {
        let base = row * n as usize;
        let pos = (ABSOLUTE_POS - base) as u32;
        let values = 1u32 << width;

        // The element goes after the elements of its node that have its digit and precede it.
        let index = level.sequence[ABSOLUTE_POS];
        let child = index >> shift;
        let value = child % values;
        let node_run = ((child - value) << shift) / RUN;
        let run = pos / RUN;
        let mut place = level.counted(row, n, values, run, value)
            - level.counted(row, n, values, node_run, value);
        if value > 0u32 {
            place += level.counted(row, n, values, node_run, value - 1u32);
            place -= level.counted(row, n, values, run, value - 1u32);
        }
        for i in run * RUN..pos {
            if (level.sequence[base + i as usize] >> shift) % values == value {
                place += 1u32;
            }
        }
        next[base + ((child << shift) + place) as usize] = index;

        // The query goes to the first child up to which there are enough candidates.
        let candidate_count = queries.candidates[ABSOLUTE_POS];
        if candidate_count > 0u32 {
            let node = queries.nodes[ABSOLUTE_POS];
            let rank = queries.wanted[ABSOLUTE_POS];
            let start = (node << width) << shift;
            let end = start + candidate_count;
            let end_run = (end - 1u32) / RUN;
            // Candidates of smaller digit, and of digit at most the best value so far.
            let mut below = 0u32;
            let mut through = candidate_count;
            let mut low = 0u32;
            let mut high = values - 1u32;
            while low < high {
                let mid = (low + high) / 2u32;
                let mut count = level.counted(row, n, values, end_run, mid)
                    - level.counted(row, n, values, start / RUN, mid);
                for i in end_run * RUN..end {
                    if (level.sequence[base + i as usize] >> shift) % values <= mid {
                        count += 1u32;
                    }
                }
                if count >= rank {
                    high = mid;
                    through = count;
                } else {
                    low = mid + 1u32;
                    below = count;
                }
            }
            queries.nodes[ABSOLUTE_POS] = (node << width) + low;
            queries.candidates[ABSOLUTE_POS] = through - below;
            queries.wanted[ABSOLUTE_POS] = rank - below;
        }
    }
}

/// Sizes of a launch of [`write_intervals_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct IntervalSizes {
    pub rows: u32,
    /// Keys of a row.
    pub n: u32,
    /// The last keys that each query keeps.
    pub recent: u32,
    /// Bits of a rank.
    pub bits: u32,
}

/// Ends the descent in nodes of at most [`RUN`] elements, bit by bit, and writes the intervals.
///
/// One unit per rank. `order`, `keys` (sort keys in rank order), and `sequence` (the last level) are contiguous
/// `[rows, n]`; a key lives `recent` positions more, at most `n`; `bits` are the bits below the nodes' digits.
/// Overwrites `intervals`, contiguous `[rows, n, 2]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn write_intervals_kernel(
    order: &[u32],
    keys: &[u32],
    sequence: &[u32],
    queries: &Queries,
    intervals: &mut [u32],
    sizes: &IntervalSizes,
) {
    let (n, bits) = (sizes.n, sizes.bits);
    let row = ABSOLUTE_POS / n as usize;
    if row < sizes.rows as usize {
        let base = row * n as usize;
        let key = order[ABSOLUTE_POS];
        let candidate_count = queries.candidates[ABSOLUTE_POS];
        let mut end = n;
        if candidate_count > 0u32 {
            let start = queries.nodes[ABSOLUTE_POS] << bits;
            let mut rank = queries.wanted[ABSOLUTE_POS];
            let mut prefix = queries.nodes[ABSOLUTE_POS];
            for level in 0..bits {
                let shift = bits - 1u32 - level;
                let mut zeros = 0u32;
                for i in start..start + candidate_count {
                    if sequence[base + i as usize] >> shift == prefix * 2u32 {
                        zeros += 1u32;
                    }
                }
                prefix *= 2u32;
                if rank > zeros {
                    rank -= zeros;
                    prefix += 1u32;
                }
            }
            // Evicted before it was seen: never attended to for its rank.
            end = max(prefix, key);
        }
        end = min(end + sizes.recent, n);
        if keys[ABSOLUTE_POS] == NEVER {
            end = key;
        }
        let target = (base + key as usize) * 2;
        intervals[target] = key;
        intervals[target + 1] = end;
    }
}

/// Intervals regardless of ranks: every key except those of score −∞ lives for `lifetime` positions, at most `n`.
///
/// One unit per key; `scores` `[batch, kv_heads, n]` of any strides with a contiguous last axis; `intervals` contiguous
/// `[batch, kv_heads, n, 2]`, overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn keep_each_kernel(
    scores: &Tensor<f32>,
    intervals: &mut [u32],
    rows: u32,
    n: u32,
    lifetime: u32,
) {
    let row = ABSOLUTE_POS / n as usize;
    if row < rows as usize {
        let key = (ABSOLUTE_POS % n as usize) as u32;
        let heads = scores.shape(1);
        let head = (row / heads) * scores.stride(0) + (row % heads) * scores.stride(1);
        let is_never = u32::reinterpret(scores[head + key as usize]) == 0xFF80_0000u32;
        intervals[ABSOLUTE_POS * 2] = key;
        intervals[ABSOLUTE_POS * 2 + 1] = select(is_never, key, min(key + lifetime, n));
    }
}

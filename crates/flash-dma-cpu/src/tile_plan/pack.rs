//! Masks to tile plans, and what a tile of queries reads of one.

use crate::masked_args::BroadcastView;
use crate::{MaskedProblem, PlanGeometry};
use rayon::prelude::*;

/// Bits of a word.
const WORD: usize = u32::BITS as usize;

/// Packs the mask: a task is the rows of one key block.
pub(crate) fn pack(
    geometry: &PlanGeometry,
    mask: &BroadcastView<'_, u8>,
    hidden: bool,
    bits: &mut [u32],
) {
    let [_, heads, blocks, queries, _] = geometry.bits_shape();
    let keys = geometry.mask[3];
    if bits.is_empty() {
        return;
    }
    let [by_batch, by_head, by_query, by_key] = core::array::from_fn(|axis| mask.step(axis));
    (bits.par_chunks_mut(2 * queries).enumerate()).for_each(|(n, rows)| {
        let (block, head, batch) = (n % blocks, n / blocks % heads, n / blocks / heads);
        for (query, words) in rows.chunks_exact_mut(2).enumerate() {
            let row = batch * by_batch + head * by_head + query * by_query;
            for (w, word) in words.iter_mut().enumerate() {
                let first = block * PlanGeometry::KEY_BLOCK + w * WORD;
                let shows = |key: usize| (mask.data[row + key * by_key] != 0) != hidden;
                *word = match keys {
                    1 if shows(0) => u32::MAX,
                    1 => 0,
                    _ => (first..keys.min(first + WORD))
                        .fold(0, |word, key| word | u32::from(shows(key)) << (key - first)),
                };
            }
        }
    });
}

/// Writes the bits of ranges of keys: a task is the rows of one key block.
pub(crate) fn pack_ranges(
    geometry: &PlanGeometry,
    [first, end]: [&BroadcastView<'_, i32>; 2],
    bits: &mut [u32],
) {
    let [_, heads, blocks, queries, _] = geometry.bits_shape();
    let keys = geometry.mask[3];
    if bits.is_empty() {
        return;
    }
    let key = |view: &BroadcastView<'_, i32>, index: [usize; 3]| {
        let at: usize = (0..3).map(|axis| index[axis] * view.step(axis)).sum();
        (view.data[at].max(0) as usize).min(keys)
    };
    (bits.par_chunks_mut(2 * queries).enumerate()).for_each(|(n, rows)| {
        let (block, head, batch) = (n % blocks, n / blocks % heads, n / blocks / heads);
        for (query, words) in rows.chunks_exact_mut(2).enumerate() {
            let index = [batch, head, query];
            let (first, end) = (key(first, index), key(end, index));
            for (w, word) in words.iter_mut().enumerate() {
                let from = block * PlanGeometry::KEY_BLOCK + w * WORD;
                let below = |key: usize| lowest(key.saturating_sub(from).min(WORD));
                *word = match keys {
                    1 if first < end => u32::MAX,
                    _ => below(end) & !below(first),
                };
            }
        }
    });
}

/// The lowest `count` bits of a word.
fn lowest(count: usize) -> u32 {
    u32::MAX.checked_shr((WORD - count) as u32).unwrap_or(0)
}

/// Counts the visible pairs of every block.
pub(crate) fn count(geometry: &PlanGeometry, bits: &[u32], counts: &mut [u32]) {
    let [_, _, query_blocks, key_blocks] = geometry.counts_shape();
    if counts.is_empty() {
        return;
    }
    let reader = Bits::new(geometry, bits);
    (counts.par_chunks_mut(key_blocks).enumerate()).for_each(|(n, counts)| {
        let (block, row) = (n % query_blocks, n / query_blocks);
        let first = block * PlanGeometry::QUERY_BLOCK;
        let queries = first..geometry.q_len.min(first + PlanGeometry::QUERY_BLOCK);
        for (key_block, count) in counts.iter_mut().enumerate() {
            *count = (queries.clone())
                .map(|query| reader.words(row, query, key_block))
                .map(|[a, b]| a.count_ones() + b.count_ones())
                .sum();
        }
    });
}

/// Reads the bits of a plan, causal masking and the end of the keys included.
#[derive(Clone, Copy)]
pub(crate) struct Bits<'a> {
    bits: &'a [u32],
    /// Blocks and queries of the stored bits.
    blocks: usize,
    queries: usize,
    q_len: usize,
    k_len: usize,
    causal: bool,
}

impl<'a> Bits<'a> {
    fn new(geometry: &PlanGeometry, bits: &'a [u32]) -> Self {
        let [_, _, blocks, queries, _] = geometry.bits_shape();
        Self {
            bits,
            blocks,
            queries,
            q_len: geometry.q_len,
            k_len: geometry.k_len,
            causal: geometry.causal,
        }
    }

    /// The bits of a problem; without a mask those of its causal masking.
    pub(crate) fn of(problem: &MaskedProblem, bits: Option<&'a [u32]>) -> Self {
        let p = &problem.attention;
        match (&problem.plan, bits) {
            (Some(plan), Some(bits)) => Self::new(plan, bits),
            _ => Self {
                bits: &[u32::MAX; 2],
                blocks: 1,
                queries: 1,
                q_len: p.q_len,
                k_len: p.k_len,
                causal: p.causal,
            },
        }
    }

    /// The two words of a query and a key block, of row `row` of the plan's batches and heads.
    pub(crate) fn words(&self, row: usize, query: usize, block: usize) -> [u32; 2] {
        let block_of_bits = if self.blocks == 1 { 0 } else { block };
        let query_of_bits = if self.queries == 1 { 0 } else { query };
        let at = ((row * self.blocks + block_of_bits) * self.queries + query_of_bits) * 2;
        // One past the last key the query sees.
        let end = if self.causal {
            (query as i64 + 1 + self.k_len as i64 - self.q_len as i64).max(0) as usize
        } else {
            self.k_len
        };
        let first = block * PlanGeometry::KEY_BLOCK;
        [0, 1].map(|w| {
            let seen = end.saturating_sub(first + w * WORD).min(WORD);
            self.bits[at + w] & lowest(seen)
        })
    }
}

/// The row of a mask or bias of `shape` for a batch and a query head, counted over its batches and heads.
pub(crate) fn row_of(
    problem: &MaskedProblem,
    shape: &[usize; 4],
    batch: usize,
    head: usize,
) -> usize {
    let batch = if shape[0] == 1 { 0 } else { batch };
    batch * shape[1] + head / problem.heads_each(shape[1])
}

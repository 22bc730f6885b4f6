//! Masks to tile plans.

use super::bits::{PlanBits, WORD, WORDS, lowest};
use crate::view::BroadcastView;
use flash_dma_problem::PlanGeometry;
use rayon::prelude::*;

/// Packs the mask.
pub(crate) fn pack(
    geometry: &PlanGeometry,
    mask: &BroadcastView<'_, u8>,
    hidden: bool,
    bits: &mut [u32],
) {
    let keys = geometry.mask[3];
    let [by_batch, by_head, by_query, by_key] = mask.steps();
    write_words(geometry, bits, |[batch, head, query]| {
        let row = batch * by_batch + head * by_head + query * by_query;
        let shows = move |key: usize| (mask.data[row + key * by_key] != 0) != hidden;
        move |first| match keys {
            1 if shows(0) => u32::MAX,
            1 => 0,
            _ => (first..keys.min(first + WORD))
                .fold(0, |word, key| word | u32::from(shows(key)) << (key - first)),
        }
    });
}

/// Writes the bits of ranges of keys.
pub(crate) fn pack_ranges(
    geometry: &PlanGeometry,
    first: &BroadcastView<'_, i32>,
    end: &BroadcastView<'_, i32>,
    bits: &mut [u32],
) {
    let keys = geometry.mask[3];
    let key = |view: &BroadcastView<'_, i32>, index: [usize; 3]| {
        let at: usize = index
            .iter()
            .zip(view.steps())
            .map(|(i, step)| i * step)
            .sum();
        (view.data[at].max(0) as usize).min(keys)
    };
    write_words(geometry, bits, |index| {
        let (first, end) = (key(first, index), key(end, index));
        move |from| {
            let below = |key: usize| lowest(key.saturating_sub(from).min(WORD));
            match keys {
                1 if first < end => u32::MAX,
                _ => below(end) & !below(first),
            }
        }
    });
}

/// Writes every word: `row` gives, for a sequence, head and query of the plan, the word that begins at a key. A task is
/// the rows of one key block.
fn write_words<W: Fn(usize) -> u32>(
    geometry: &PlanGeometry,
    bits: &mut [u32],
    row: impl Fn([usize; 3]) -> W + Sync,
) {
    let [_, heads, blocks, queries, _] = geometry.bits_shape();
    if bits.is_empty() {
        return;
    }
    (bits.par_chunks_mut(WORDS * queries).enumerate()).for_each(|(n, rows)| {
        let (block, head, batch) = (n % blocks, n / blocks % heads, n / blocks / heads);
        for (query, words) in rows.chunks_exact_mut(WORDS).enumerate() {
            let word_at = row([batch, head, query]);
            for (w, word) in words.iter_mut().enumerate() {
                *word = word_at(block * PlanGeometry::KEY_BLOCK + w * WORD);
            }
        }
    });
}

/// Counts the visible pairs of every block.
pub(crate) fn count(geometry: &PlanGeometry, bits: &[u32], counts: &mut [u32]) {
    let [_, _, query_blocks, key_blocks] = geometry.counts_shape();
    if counts.is_empty() {
        return;
    }
    let reader = PlanBits::new(geometry, bits);
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

//! Tile plans of masks: writing them, and reading the keys that a query sees, with causal masking and the keys' end.

use crate::position::Positions;
use crate::queries::{KvHead, QueryRows};
use crate::view::BroadcastView;
use flash_dma_problem::{MaskedProblem, PlanGeometry};
use rayon::prelude::*;

pub(crate) const WORD: usize = u32::BITS as usize;
/// Words of a query in one key block.
pub(crate) const WORDS: usize = PlanGeometry::KEY_BLOCK / WORD;

#[derive(Clone, Copy)]
pub(crate) struct PlanBits<'a> {
    bits: &'a [u32],
    /// Sizes of the stored bits: 1 where the mask broadcasts.
    blocks: usize,
    queries: usize,
    pub(crate) positions: Positions,
}

impl<'a> PlanBits<'a> {
    pub(crate) fn new(geometry: &PlanGeometry, bits: &'a [u32]) -> Self {
        let [_, _, blocks, queries, _] = geometry.bits_shape();
        Self {
            bits,
            blocks,
            queries,
            positions: geometry.into(),
        }
    }

    /// The words of a query and a key block; `row` counts over the sequences and heads of the plan.
    pub(crate) fn words(&self, row: usize, query: usize, block: usize) -> [u32; WORDS] {
        let block_of_bits = if self.blocks == 1 { 0 } else { block };
        let query_of_bits = if self.queries == 1 { 0 } else { query };
        let at = ((row * self.blocks + block_of_bits) * self.queries + query_of_bits) * WORDS;
        let visible = self.positions.visible(query);
        let first = block * PlanGeometry::KEY_BLOCK;
        core::array::from_fn(|w| {
            let visible = visible.saturating_sub(first + w * WORD).min(WORD);
            self.bits[at + w] & lowest(visible)
        })
    }
}

/// The bits of a problem's mask, whose sequences and heads may broadcast.
#[derive(Clone, Copy)]
pub(crate) struct MaskBits<'a> {
    pub(crate) bits: PlanBits<'a>,
    batches: usize,
    heads: usize,
    /// Query heads that share a head of the mask.
    heads_each: usize,
}

impl<'a> MaskBits<'a> {
    /// Creates them; without a mask they are those of the problem's causal masking.
    pub(crate) fn new(problem: &MaskedProblem, bits: Option<&'a [u32]>) -> Self {
        let (bits, batches, heads) = match (&problem.plan, bits) {
            (Some(plan), Some(bits)) => (PlanBits::new(plan, bits), plan.mask[0], plan.mask[1]),
            _ => {
                let all = PlanBits {
                    bits: &[u32::MAX; WORDS],
                    blocks: 1,
                    queries: 1,
                    positions: (&problem.attention).into(),
                };
                (all, 1, 1)
            }
        };
        Self {
            bits,
            batches,
            heads,
            heads_each: problem.heads_each(heads),
        }
    }

    /// The plan's row of a head of a tile's group.
    pub(crate) fn row_of(&self, tile: &QueryRows, member: usize) -> usize {
        let KvHead { batch, head } = tile.kv_head;
        let batch = if self.batches == 1 { 0 } else { batch };
        batch * self.heads + (head * tile.group + member) / self.heads_each
    }
}

/// The lowest `count` bits of a word.
fn lowest(count: usize) -> u32 {
    u32::MAX.checked_shr((WORD - count) as u32).unwrap_or(0)
}

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

pub(crate) fn pack_ranges(
    geometry: &PlanGeometry,
    first: &BroadcastView<'_, i32>,
    end: &BroadcastView<'_, i32>,
    bits: &mut [u32],
) {
    let keys = geometry.mask[3];
    let key = |view: &BroadcastView<'_, i32>, index: [usize; 3]| {
        let steps = index.iter().zip(view.steps());
        let at: usize = steps.map(|(i, step)| i * step).sum();
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

/// Writes every word; `row` maps a plan's sequence, head and query to the word at a key. A task is a key block's rows.
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

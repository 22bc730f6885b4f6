//! Reading a tile plan: the keys that a query sees, causal masking and the end of the keys included.

use crate::position::Positions;
use crate::queries::{KvHead, QueryRows};
use flash_dma_problem::{MaskedProblem, PlanGeometry};

/// Bits of a word.
pub(crate) const WORD: usize = u32::BITS as usize;
/// Words of a query in one key block.
pub(crate) const WORDS: usize = PlanGeometry::KEY_BLOCK / WORD;

/// The bits of a plan.
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
    /// Without a mask the bits are those of the problem's causal masking.
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
pub(crate) fn lowest(count: usize) -> u32 {
    u32::MAX.checked_shr((WORD - count) as u32).unwrap_or(0)
}

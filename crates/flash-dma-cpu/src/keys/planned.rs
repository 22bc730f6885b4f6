//! The keys of a query tile: which blocks it sees, and a few of them gathered.

use crate::masked_args::{BroadcastView, MaskedInputs};
use crate::scratch::Buffer;
use crate::simd::LANES;
use crate::tile_plan::pack::{Bits, row_of};
use crate::{Element, MaskedProblem, PlanGeometry};
use std::ops::Range;

/// Words a row of one key block.
const WORDS: usize = PlanGeometry::KEY_BLOCK / u32::BITS as usize;

/// What a query tile sees. Row `h * queries + i` is query `i` of head `h` of the group.
#[derive(Default)]
pub(crate) struct TileBlocks {
    /// The key blocks that some row sees something of, ascending, and whether every row sees them whole.
    pub(crate) blocks: Vec<(usize, bool)>,
    /// `[blocks, rows, 2]`: the bits.
    words: Vec<[u32; WORDS]>,
    rows: usize,
}

impl TileBlocks {
    /// Looks at the bits of the queries `tile` of a key/value head.
    pub(crate) fn look(
        &mut self,
        problem: &MaskedProblem,
        bits: &Bits<'_>,
        [batch, kv_head]: [usize; 2],
        tile: &Range<usize>,
    ) {
        let p = &problem.attention;
        let group = p.group();
        self.rows = group * tile.len();
        self.blocks.clear();
        self.words.clear();
        let seen = (p.position(tile.end - 1) + 1).max(0) as usize;
        for block in 0..seen.div_ceil(PlanGeometry::KEY_BLOCK) {
            let begin = self.words.len();
            let keys = (p.k_len - block * PlanGeometry::KEY_BLOCK).min(PlanGeometry::KEY_BLOCK);
            let (mut any, mut all) = (0, true);
            for h in 0..group {
                let row = problem.plan.as_ref().map_or(0, |plan| {
                    row_of(problem, &plan.mask, batch, kv_head * group + h)
                });
                for query in tile.clone() {
                    let words = bits.words(row, query, block);
                    any |= words[0] | words[1];
                    all &= (words[0].count_ones() + words[1].count_ones()) as usize == keys;
                    self.words.push(words);
                }
            }
            if any == 0 {
                self.words.truncate(begin);
            } else {
                self.blocks.push((block, all));
            }
        }
    }

    /// Whether `row` sees column `column` of the gathered blocks from `first` on.
    pub(crate) fn sees(&self, first: usize, row: usize, column: usize) -> bool {
        let block = first + column / PlanGeometry::KEY_BLOCK;
        let at = column % PlanGeometry::KEY_BLOCK;
        self.words[block * self.rows + row][at / 32] >> (at % 32) & 1 == 1
    }

    /// The bits of [`LANES`] columns of the blocks from `first` on.
    #[inline(always)]
    pub(crate) fn lanes(&self, first: usize, row: usize, lane_block: usize) -> u32 {
        let column = lane_block * LANES;
        let block = first + column / PlanGeometry::KEY_BLOCK;
        let at = column % PlanGeometry::KEY_BLOCK;
        self.words[block * self.rows + row][at / 32] >> (at % 32)
    }
}

/// Some key blocks of a tile, gathered: rows of K and V in f32 and the biases, padded with zeros to whole
/// SIMD registers of columns.
#[derive(Default)]
pub(crate) struct MaskedKeys {
    /// The first of the tile's blocks.
    pub(crate) first: usize,
    /// The key ranges, one a block; all but the last are whole.
    pub(crate) keys: Vec<Range<usize>>,
    /// Keys, and keys padded.
    pub(crate) len: usize,
    pub(crate) columns: usize,
    /// Whether every row sees every one of the keys.
    pub(crate) full: bool,
    /// `[columns, head_dim]`.
    pub(crate) k: Buffer,
    pub(crate) v: Buffer,
    /// `[rows, columns]`, or `[columns]` if `one_bias`.
    pub(crate) bias: Buffer,
    pub(crate) one_bias: bool,
}

impl MaskedKeys {
    /// Gathers the blocks `blocks` of a tile.
    pub(crate) fn gather<E: Element>(
        &mut self,
        problem: &MaskedProblem,
        inputs: &MaskedInputs<'_, E>,
        [batch, kv_head]: [usize; 2],
        tile: &Range<usize>,
        seen: &TileBlocks,
        blocks: Range<usize>,
    ) {
        let p = &problem.attention;
        let dim = p.head_dim;
        self.first = blocks.start;
        let size = PlanGeometry::KEY_BLOCK;
        let blocks = &seen.blocks[blocks];
        self.keys.clear();
        (self.keys).extend(
            (blocks.iter()).map(|(block, _)| block * size..p.k_len.min((block + 1) * size)),
        );
        self.len = self.keys.iter().map(|keys| keys.len()).sum();
        self.columns = self.len.next_multiple_of(LANES);
        self.full = blocks.iter().all(|(_, full)| *full) && self.len == self.columns;
        let (k, v) = (
            self.k.get(self.columns * dim),
            self.v.get(self.columns * dim),
        );
        for (column, key) in self.keys.iter().cloned().flatten().enumerate() {
            let row = column * dim..(column + 1) * dim;
            E::widen(inputs.k.row(batch, kv_head, key), &mut k[row.clone()]);
            E::widen(inputs.v.row(batch, kv_head, key), &mut v[row]);
        }
        k[self.len * dim..].fill(0.0);
        v[self.len * dim..].fill(0.0);
        self.gather_bias(problem, inputs.bias.as_ref(), batch, kv_head, tile);
    }

    fn gather_bias(
        &mut self,
        problem: &MaskedProblem,
        bias: Option<&BroadcastView<'_, f32>>,
        batch: usize,
        kv_head: usize,
        tile: &Range<usize>,
    ) {
        let (p, columns) = (&problem.attention, self.columns);
        let Some(bias) = bias else {
            self.one_bias = true;
            return self.bias.get(columns).fill(0.0);
        };
        let each = problem.heads_each(bias.shape[1]);
        self.one_bias = bias.shape[2] == 1 && each >= p.group();
        let rows = if self.one_bias { 1 } else { tile.len() };
        let heads = if self.one_bias { 1 } else { p.group() };
        let step = bias.step(3);
        let target = self.bias.get(heads * rows * columns);
        let mut targets = target.chunks_exact_mut(columns);
        for h in 0..heads {
            let head = (kv_head * p.group() + h) / each;
            for (query, target) in tile.clone().take(rows).zip(&mut targets) {
                let from = batch * bias.step(0) + head * bias.step(1) + query * bias.step(2);
                for (x, key) in target.iter_mut().zip(self.keys.iter().cloned().flatten()) {
                    *x = bias.data[from + key * step];
                }
                target[self.len..].fill(0.0);
            }
        }
    }

    /// The biases of a row.
    #[inline(always)]
    pub(crate) fn bias_of(&self, row: usize) -> &[f32] {
        let row = if self.one_bias { 0 } else { row };
        &self.bias.read((row + 1) * self.columns)[row * self.columns..]
    }
}

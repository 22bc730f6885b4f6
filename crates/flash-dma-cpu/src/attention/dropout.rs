//! Dropout of the pairs of a tile's rows and a block's keys.

use crate::keys::block::KeyBlock;
use crate::queries::QueryRows;
use crate::simd::LANES;
use flash_dma_problem::dropout::{PairMask, column_word, row_word};
use flash_dma_problem::{Dropout, Problem};

/// The words of a tile's rows and of a block's columns; empty without dropout.
#[derive(Default)]
pub(super) struct DropoutWords {
    rows: Vec<u32>,
    columns: Vec<[u32; LANES]>,
}

/// The dropout mask of a tile's rows and a block's columns.
#[derive(Clone, Copy)]
pub(super) struct BlockMask<'a> {
    mask: PairMask,
    rows: &'a [u32],
    columns: &'a [[u32; LANES]],
}

impl DropoutWords {
    pub(super) fn set_rows(&mut self, problem: &Problem, tile: &QueryRows) {
        self.rows.clear();
        let Some(mask) = problem.dropout.map(Dropout::mask) else {
            return;
        };
        let first = tile.kv_head.batch * problem.q_heads;
        self.rows.extend((0..tile.len()).map(|r| {
            let head = mask.head_word(first + tile.q_head(r));
            row_word(head, problem.dropout_position(tile.query(r)))
        }));
    }

    pub(super) fn of_block(
        &mut self,
        problem: &Problem,
        block: &KeyBlock<'_>,
    ) -> Option<BlockMask<'_>> {
        let mask = problem.dropout?.mask();
        self.columns.clear();
        self.columns.resize(block.columns / LANES, [0; LANES]);
        for (word, &key) in self.columns.as_flattened_mut().iter_mut().zip(block.keys) {
            *word = column_word(mask.columns, key);
        }
        Some(BlockMask {
            mask,
            rows: &self.rows,
            columns: &self.columns,
        })
    }
}

impl BlockMask<'_> {
    /// Multiplies the values of a row's pairs by the mask.
    #[inline(always)]
    pub(super) fn apply(&self, row: usize, values: &mut [[f32; LANES]]) {
        let row = self.rows[row];
        for (values, columns) in values.iter_mut().zip(self.columns) {
            for t in 0..LANES {
                values[t] *= self.mask.weight(row, columns[t]);
            }
        }
    }
}

//! Lists of a tile's keys by a mask's tile plan: whole blocks of keys, with a bit per pair.

use super::KeyList;
use super::visibility::BitRows;
use crate::queries::QueryRows;
use crate::tile_plan::{MaskBits, WORDS};
use flash_dma_problem::PlanGeometry;
use std::ops::Range;

const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// The keys of a chunk of queries, listed tile by tile. An entry is the index of its key.
pub(crate) struct PlannedLists<'a> {
    pub(crate) keys: KeyList,
    mask: MaskBits<'a>,
    k_len: usize,
    /// For each key block that the tile lists, in index order, true if every row attends to all of it. All listed
    /// blocks except the last have [`KEY_BLOCK`] keys.
    full: Vec<bool>,
    /// `[listed blocks, rows]`: the bits.
    words: Vec<[u32; WORDS]>,
    rows: usize,
}

impl<'a> PlannedLists<'a> {
    /// Every key that the chunk may see, in whole blocks.
    pub(crate) fn new(mask: MaskBits<'a>, k_len: usize, chunk: &QueryRows) -> Self {
        let visible = mask.bits.positions.visible_to_any(&chunk.queries);
        let end = visible.next_multiple_of(KEY_BLOCK).min(k_len);
        Self {
            keys: KeyList {
                index: (0..end as u32).collect(),
                entries: Vec::new(),
            },
            mask,
            k_len,
            full: Vec::new(),
            words: Vec::new(),
            rows: 0,
        }
    }

    /// Lists the keys of a tile: the blocks in which some row sees something.
    pub(crate) fn advance(&mut self, tile: &QueryRows) {
        self.rows = tile.len();
        self.keys.entries.clear();
        self.full.clear();
        self.words.clear();
        let visible = self.mask.bits.positions.visible_to_any(&tile.queries);
        for block in 0..visible.div_ceil(KEY_BLOCK) {
            let begin = self.words.len();
            let keys = block * KEY_BLOCK..self.k_len.min((block + 1) * KEY_BLOCK);
            let (mut any, mut all) = (0, true);
            for member in 0..tile.group {
                let row = self.mask.row_of(tile, member);
                for query in tile.queries.clone() {
                    let words = self.mask.bits.words(row, query, block);
                    any |= words[0] | words[1];
                    all &= (words[0].count_ones() + words[1].count_ones()) as usize == keys.len();
                    self.words.push(words);
                }
            }
            if any == 0 {
                self.words.truncate(begin);
            } else {
                self.keys.entries.extend(keys.start as u32..keys.end as u32);
                self.full.push(all);
            }
        }
    }

    /// True if every row attends to all of the blocks at `places`, which begin with a block.
    pub(crate) fn is_full(&self, places: &Range<usize>) -> bool {
        let blocks = places.start / KEY_BLOCK..places.end.div_ceil(KEY_BLOCK);
        self.full[blocks].iter().all(|&full| full)
    }

    /// The bits of the blocks from `place` on, with which a block begins.
    pub(crate) fn bit_rows(&self, place: usize) -> BitRows<'_> {
        BitRows {
            words: &self.words[place / KEY_BLOCK * self.rows..],
            rows: self.rows,
        }
    }
}

//! A block of a tile's keys, gathered.

use super::tile::TileKeys;
use super::visibility::{QueryRanges, RowQuery, Visibility};
use crate::element::Element;
use crate::keys::operands::{KeyRows, Operands};
use crate::queries::QueryRows;
use crate::scratch::Buffer;
use crate::simd::LANES;
use flash_dma_problem::Problem;
use std::ops::Range;

#[derive(Default)]
pub(crate) struct BlockBuffers {
    keys: Vec<u32>,
    k: Buffer,
    v: Buffer,
    bias: Buffer,
    start: Vec<i32>,
    end: Vec<i32>,
}

/// Rows of K and V widened to f32 and their biases, padded to whole SIMD registers with rows of zeros.
pub(crate) struct KeyBlock<'a> {
    /// The keys, by entry of the chunk's list and by index.
    pub(crate) entries: &'a [u32],
    pub(crate) keys: &'a [u32],
    /// The number of keys, rounded up to whole SIMD registers: the columns of the block's logits.
    pub(crate) columns: usize,
    /// The first column that must be tested for visibility: from here on some row does not attend to some column, or
    /// the columns are padding. A multiple of the lanes.
    pub(crate) tested: usize,
    pub(crate) visible: Visibility<'a>,
    pub(crate) queries: usize,
    /// `[columns, head_dim]`.
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    /// `[rows, columns]`, or `[columns]` if all rows share it.
    bias: &'a [f32],
    one_bias: bool,
}

impl BlockBuffers {
    /// Gathers the keys at `places` of a tile's list. Their biases include ALiBi.
    pub(crate) fn gather<'a, E: Element, R: KeyRows<E>>(
        &'a mut self,
        operands: &Operands<'_, E, R>,
        tile: &QueryRows,
        list: &'a TileKeys<'_>,
        places: Range<usize>,
    ) -> KeyBlock<'a> {
        let problem = operands.problem;
        let dim = problem.head_dim;
        let entries = &list.list().entries[places.clone()];
        let len = entries.len();
        let columns = len.next_multiple_of(LANES);
        let index = &list.list().index;
        self.keys.clear();
        (self.keys).extend(entries.iter().map(|&entry| index[entry as usize]));
        let (k, v) = (self.k.get(columns * dim), self.v.get(columns * dim));
        for (column, &key) in self.keys.iter().enumerate() {
            let row = column * dim..(column + 1) * dim;
            let [key, value] = operands.rows.rows(tile.kv_head, key as usize);
            E::widen(key, &mut k[row.clone()]);
            E::widen(value, &mut v[row]);
        }
        k[len * dim..].fill(0.0);
        v[len * dim..].fill(0.0);

        let one_bias =
            problem.alibi.is_none() && operands.bias.is_none_or(|bias| bias.is_one_row(tile));
        let bias_rows = if one_bias { 1 } else { tile.len() };
        let biases = self.bias.get(bias_rows * columns);
        match &operands.bias {
            None => biases.fill(0.0),
            Some(bias) => {
                for (row, biases) in biases.chunks_exact_mut(columns).enumerate() {
                    bias.gather(tile, row, &self.keys, biases);
                    biases[len..].fill(0.0);
                }
            }
        }
        if problem.alibi.is_some() {
            for (row, biases) in biases.chunks_exact_mut(columns).enumerate() {
                add_alibi(problem, tile, row, &self.keys, biases);
            }
        }

        let (tested, visible) = match list {
            TileKeys::Intervals { lists, .. } => {
                let full = lists.full.clamp(places.start, places.end) - places.start;
                self.start.clear();
                self.end.clear();
                self.start.reserve(columns);
                self.end.reserve(columns);
                self.start.resize(full, 0);
                self.end.resize(full, i32::MAX);
                for &(start, end) in lists.boundary(&places) {
                    self.start.push(start);
                    self.end.push(end);
                }
                self.start.resize(columns, 0);
                self.end.resize(columns, 0);
                let visible = QueryRanges {
                    start: self.start.as_chunks().0,
                    end: self.end.as_chunks().0,
                };
                // Columns are whole registers.
                let tested = full - full % LANES;
                (tested, Visibility::Queries(visible))
            }
            TileKeys::Planned(lists) => {
                let full = len == columns && lists.is_full(&places);
                let visible = lists.bit_rows(places.start);
                (if full { columns } else { 0 }, Visibility::Bits(visible))
            }
        };
        KeyBlock {
            entries,
            keys: &self.keys,
            columns,
            tested,
            visible,
            queries: tile.queries.len(),
            k,
            v,
            bias: biases,
            one_bias,
        }
    }
}

/// Adds ALiBi for the row of a tile to its `biases`, which are those of `keys`.
fn add_alibi(problem: &Problem, tile: &QueryRows, row: usize, keys: &[u32], biases: &mut [f32]) {
    let slope = problem.slope(tile.q_head(row)).unwrap_or(0.0);
    // As in `Problem::distance`, except for the sign, which does not matter; below 2^31 for every key.
    let last = (tile.query(row) + problem.k_len) as i64 - problem.q_len as i64;
    for (bias, &key) in biases.iter_mut().zip(keys) {
        *bias -= slope * ((last - i64::from(key)) as i32).abs() as f32;
    }
}

impl KeyBlock<'_> {
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The keys that some row does not attend to, and perhaps others.
    pub(crate) fn boundary(&self) -> Range<usize> {
        self.tested..self.len()
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> RowQuery {
        RowQuery {
            row,
            query: row % self.queries,
        }
    }

    pub(crate) fn attends(&self, row: usize, column: usize) -> bool {
        self.visible.contains(self.row(row), column)
    }

    #[inline(always)]
    pub(crate) fn bias_of(&self, row: usize) -> &[[f32; LANES]] {
        let row = if self.one_bias { 0 } else { row };
        self.bias[row * self.columns..(row + 1) * self.columns]
            .as_chunks()
            .0
    }
}

//! Page management: sequences take pages, copy shared ones before they write, and give them back.

use super::paged::{PagedCache, State};
use super::pool::{lengths_tensor, table_tensor};
use super::tokens::Rows;
use crate::fallback::tensors::ints;
use burn::tensor::{DType, Int, Tensor, s};
use flash_dma_problem::{AttentionError, CacheShape};

impl PagedCache {
    /// Gives each sequence unshared pages for `tokens` more tokens.
    pub(super) fn reserve(&mut self, tokens: usize) -> Result<(), AttentionError> {
        let held = self.held();
        let growth = (self.pool).growth(&held, tokens, self.config.grow_by)?;
        let pages = self.pool.pages().saturating_add(growth);
        let shape = self.config.shape(pages)?;
        self.grow(growth, shape);
        if let Some(copies) = self.pool.allocate(&held, tokens) {
            self.copy(&copies);
            self.upload_table();
        }
        Ok(())
    }

    fn grow(&mut self, pages: usize, shape: CacheShape) {
        self.shape = shape;
        if pages == 0 {
            return;
        }
        self.pool.grow(pages);
        let state = self.state.take().expect("no operation has the cache");
        let [_, heads, page_len, dim] = shape.kv_shape();
        let grown = |old: Tensor<4>| {
            let (dtype, shape) = (old.dtype(), [pages, heads, page_len, dim]);
            Tensor::cat(vec![old, Tensor::zeros(shape, (&self.device, dtype))], 0)
        };
        let scores = |old: Tensor<3>| {
            let new = Tensor::zeros([pages, heads, page_len], (&self.device, DType::F32));
            Tensor::cat(vec![old, new], 0)
        };
        self.state = Some(State {
            rows: Rows {
                k: grown(state.rows.k),
                v: grown(state.rows.v),
                scores: state.rows.scores.map(scores),
            },
            ..state
        });
    }

    /// Copies pages `[from, to]`, none of which is in both columns, within the pool's memory.
    pub(super) fn copy(&mut self, pages: &[[i32; 2]]) {
        if pages.is_empty() {
            return;
        }
        let from = pages.iter().map(|&[from, _]| from).collect();
        let from = ints(from, [pages.len()], &self.device);
        let to: Vec<usize> = pages.iter().map(|&[_, to]| to as usize).collect();
        let state = self.state.take().expect("no operation has the cache");
        self.state = Some(State {
            rows: Rows {
                k: copied(state.rows.k, &from, &to),
                v: copied(state.rows.v, &from, &to),
                scores: (state.rows.scores).map(|scores| copied(scores, &from, &to)),
            },
            ..state
        });
    }

    /// Returns pages whose keys are all outside the next query's window.
    pub(super) fn slide(&mut self) {
        let Some(window) = self.config.window else {
            return;
        };
        let page_len = self.config.page_len;
        let mut slid = false;
        for sequence in 0..self.lengths.len() {
            // The next query sees `window - 1` of these tokens.
            let unseen = (self.lengths[sequence] + 1).saturating_sub(window);
            let pages = unseen.saturating_sub(self.dropped[sequence]) / page_len;
            if pages > 0 {
                self.pool.trim_front(sequence, pages);
                self.dropped[sequence] += pages * page_len;
                slid = true;
            }
        }
        if slid {
            self.upload();
        }
    }

    pub(super) fn upload(&mut self) {
        let lengths = lengths_tensor(&self.held(), &self.device);
        self.state_mut().lengths = lengths;
        self.upload_table();
    }

    fn upload_table(&mut self) {
        self.state_mut().table = table_tensor(&self.pool, self.config.max_pages(), &self.device);
    }
}

/// `rows` with the pages `to` overwritten by the pages `from`. These are read before anything is written, and nothing
/// else reads the pool then, so it is written in place.
fn copied<const D: usize>(rows: Tensor<D>, from: &Tensor<1, Int>, to: &[usize]) -> Tensor<D> {
    let pages = rows.clone().select(0, from.clone());
    to.iter().enumerate().fold(rows, |rows, (i, &to)| {
        rows.slice_assign(s![to..to + 1], pages.clone().slice(s![i..i + 1]))
    })
}

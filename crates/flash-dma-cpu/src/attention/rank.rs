//! The gradient of the rank: for each query the change of the loss if one of its runners-up were attended to, or a key
//! that it keeps were not.
//!
//! The tasks and tiles are those of the backward pass, with the runners-up or the kept keys as keys and two products
//! per pair. Every task sums over its own queries; a head's sums are added in order, whatever the threads.

use super::backward::{GradientTile, PairGradients, row_of};
use super::schedule::{Chunks, key_block, query_tile};
use super::softmax::{RowLse, at_most_0};
use crate::args::Saved;
use crate::element::Element;
use crate::keys::block::{BlockBuffers, KeyBlock};
use crate::keys::operands::{KeyRows, Operands};
use crate::keys::tile::TileKeys;
use crate::keys::visibility::{Visibility, VisibleLanes, VisiblePairs};
use crate::queries::QueryRows;
use crate::scratch::Buffer;
use crate::simd::{LANES, Loop, exp, run, sigmoid_softplus, tanh};
use flash_dma_problem::OWN_OUTPUT_WEIGHT;
use rayon::prelude::*;

/// The change of a query's keys that trains a rank.
pub(crate) trait Change: Copy + Sync {
    /// The contribution of a key whose logit is `above` more than its query's LSE: the factor of `v - out`, and the
    /// part of the LSE, which is only read with `LSE`.
    fn part<const FUSED: bool, const LSE: bool>(self, above: f32) -> (f32, f32);
}

/// A runner-up is also attended to.
#[derive(Clone, Copy)]
pub(crate) struct Added;

impl Change for Added {
    #[inline(always)]
    fn part<const FUSED: bool, const LSE: bool>(self, above: f32) -> (f32, f32) {
        sigmoid_softplus::<FUSED>(above)
    }
}

/// A kept key is left out, and the output itself has the [`OWN_OUTPUT_WEIGHT`].
#[derive(Clone, Copy)]
pub(crate) struct LeftOut;

impl Change for LeftOut {
    #[inline(always)]
    fn part<const FUSED: bool, const LSE: bool>(self, above: f32) -> (f32, f32) {
        let p = exp::<FUSED>(at_most_0(above));
        let weight = p / (1.0 + OWN_OUTPUT_WEIGHT - p);
        // This is a call per pair.
        let lse = if LSE { weight.ln_1p() } else { 0.0 };
        (weight, lse)
    }
}

/// Adds the rank gradients of the keys of `operands`, by a change, to `rank`, contiguous `[batch, kv_heads, k_len]`.
pub(crate) fn rank<E: Element, R: KeyRows<E>>(
    operands: &Operands<'_, E, R>,
    saved: &Saved<'_, E>,
    change: impl Change,
    rank: &mut [f32],
) {
    let problem = operands.problem;
    let chunks = Chunks::backward(problem);
    let tasks = problem.batch * problem.kv_heads * chunks.per_head();
    let done: Vec<(Vec<u32>, Vec<f32>)> = (0..tasks)
        .into_par_iter()
        .with_max_len(1)
        .map(|task| of_chunk(operands, saved, change, &chunks.rows(task)))
        .collect();
    for (task, (index, sums)) in done.iter().enumerate() {
        let row = task / chunks.per_head() * problem.k_len;
        for (&key, sum) in index.iter().zip(sums) {
            rank[row + key as usize] += sum;
        }
    }
}

/// The keys of a chunk of queries, and their sums.
fn of_chunk<E: Element, R: KeyRows<E>>(
    operands: &Operands<'_, E, R>,
    saved: &Saved<'_, E>,
    change: impl Change,
    chunk: &QueryRows,
) -> (Vec<u32>, Vec<f32>) {
    let problem = operands.problem;
    let mut keys = TileKeys::new(&operands.source, problem, chunk);
    let mut sums = vec![0.0; keys.list().index.len()];
    let (mut tile, mut pairs) = (GradientTile::default(), PairGradients::default());
    let (mut buffers, mut columns) = (BlockBuffers::default(), Buffer::default());
    let mut grad_lse = Vec::new();
    for rows in chunk.tiles(query_tile(problem)) {
        keys.advance(&rows);
        if keys.list().entries.is_empty() {
            continue;
        }
        tile.load(operands, saved, &rows);
        if let Some(all) = saved.grad_lse {
            grad_lse.clear();
            grad_lse.extend((0..rows.len()).map(|r| all[row_of(&rows, r, problem)]));
        }
        for places in keys.blocks(key_block(problem)) {
            let block = buffers.gather(operands, &rows, &keys, places);
            pairs.multiply(problem, &tile, &block);
            let len = tile.rows * block.columns;
            let of_columns = columns.get(block.columns);
            of_columns.fill(0.0);
            run(RankBlock {
                products: pairs.p.read(len),
                dp: pairs.ds.read(len),
                block: &block,
                change,
                softcap: problem.softcap,
                lse: tile.lse.read(tile.rows),
                delta: tile.delta.read(tile.rows),
                grad_lse: saved.grad_lse.map(|_| &grad_lse[..]),
                sums: of_columns.as_chunks_mut().0,
            });
            for (&entry, sum) in block.entries.iter().zip(of_columns) {
                sums[entry as usize] += *sum;
            }
        }
    }
    (keys.into_index(), sums)
}

/// The sums over the rows of one block of keys.
struct RankBlock<'a, C> {
    /// `[rows, columns]`: scaled products.
    products: &'a [f32],
    /// `[rows, columns]`: products of the output gradients and the values.
    dp: &'a [f32],
    block: &'a KeyBlock<'a>,
    change: C,
    softcap: Option<f32>,
    lse: RowLse<'a>,
    /// `[rows]`: `sum(grad_out * out) - grad_lse`.
    delta: &'a [f32],
    /// `[rows]`; `None` is zero.
    grad_lse: Option<&'a [f32]>,
    /// `[columns]`, added to.
    sums: &'a mut [[f32; LANES]],
}

impl<C: Change> Loop for RankBlock<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match (self.grad_lse, self.block.visible) {
            (None, Visibility::Queries(visible)) => self.rows::<FUSED, false, _>(visible),
            (None, Visibility::Bits(visible)) => self.rows::<FUSED, false, _>(visible),
            (Some(_), Visibility::Queries(visible)) => self.rows::<FUSED, true, _>(visible),
            (Some(_), Visibility::Bits(visible)) => self.rows::<FUSED, true, _>(visible),
        }
    }
}

impl<C: Change> RankBlock<'_, C> {
    #[inline(always)]
    fn rows<const FUSED: bool, const LSE: bool, V: VisiblePairs>(self, visible: V) {
        let columns = self.block.columns;
        let tested = self.block.tested / LANES;
        let blocks = (self.products.chunks_exact(columns)).zip(self.dp.chunks_exact(columns));
        for (r, (products, dp)) in blocks.enumerate() {
            if self.lse.attends_to_nothing(r) {
                continue;
            }
            let of_lse = self.grad_lse.map_or(0.0, |grad| grad[r]);
            let mean = self.delta[r] + of_lse;
            let bias = self.block.bias_of(r);
            let at = self.block.row(r);
            let (products, dp) = (products.as_chunks::<LANES>().0, dp.as_chunks::<LANES>().0);
            for (c, (products, dp)) in products.iter().zip(dp).enumerate() {
                let mut change = [0.0; LANES];
                for t in 0..LANES {
                    let logit = match self.softcap {
                        Some(cap) => cap * tanh::<FUSED>(products[t] / cap),
                        None => products[t],
                    };
                    let above = self.lse.above(r, logit + bias[c][t]);
                    let (weight, part) = self.change.part::<FUSED, LSE>(above);
                    change[t] = weight * (dp[t] - mean);
                    if LSE {
                        change[t] += of_lse * part;
                    }
                }
                if c >= tested {
                    let visible = visible.lanes(at, c);
                    for (t, change) in change.iter_mut().enumerate() {
                        *change = if visible.contains(t) { *change } else { 0.0 };
                    }
                }
                for (sum, change) in self.sums[c].iter_mut().zip(change) {
                    *sum += change;
                }
            }
        }
    }
}

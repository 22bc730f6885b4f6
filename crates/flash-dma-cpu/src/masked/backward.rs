//! The backward pass: one pass over the query tiles, recomputing the probabilities from the LSE.
//!
//! As in [`crate::attention::backward`], a task is a chunk of the queries of one key/value head and keeps f32 gradients
//! of the keys, and of the biases of its rows.

use super::forward::blocks_at_once;
use super::softmax::GradientBlock;
use crate::attention::backward::{Partial, add_scaled, load_gradient_tile, reduce};
use crate::attention::schedule::{backward_chunks, query_tile, split_rows};
use crate::gemm::{Matrix, product};
use crate::keys::intervals::RangeKeys;
use crate::keys::planned::MaskedKeys;
use crate::masked_args::{MaskedGradients, MaskedInputs};
use crate::scratch::{Scratch, is_finite, with_scratch};
use crate::simd::run;
use crate::tile_plan::pack::Bits;
use crate::{Element, MaskedProblem, PlanGeometry, Saved};
use rayon::prelude::*;
use std::ops::Range;

/// The whole pass, on checked arguments.
pub(crate) fn backward<E: Element>(
    problem: &MaskedProblem,
    inputs: &MaskedInputs<'_, E>,
    saved: &Saved<'_, E>,
    grads: MaskedGradients<'_, E>,
) {
    let p = &problem.attention;
    let bounds = backward_chunks(p);
    let chunks = bounds.len() - 1;
    let bits = Bits::of(problem, inputs.bits);
    let mut dbias = grads.bias;
    if let Some(dbias) = dbias.as_deref_mut() {
        dbias.fill(0.0);
    }
    let mut partials = Vec::new();
    let mut tasks: Vec<_> = (split_rows(grads.q, p, &bounds, p.head_dim).into_iter())
        .enumerate()
        .collect();
    // Tasks at once keep a copy of the biases of their rows: heads that share them take turns.
    let wanted = dbias.is_some();
    let at_once = match problem.bias.filter(|_| wanted) {
        Some([b, h, q, _]) if q > 1 && (b < p.batch || h < p.kv_heads) => chunks,
        _ => tasks.len(),
    };
    while !tasks.is_empty() {
        let rest = tasks.split_off(at_once.min(tasks.len()));
        let done: Vec<(Partial, BiasRows)> = (tasks.into_par_iter())
            .with_max_len(1)
            .map(|(task, mut dq)| {
                let (head, chunk) = (task / chunks, task % chunks);
                let head = [head / p.kv_heads, head % p.kv_heads];
                let queries = bounds[chunk]..bounds[chunk + 1];
                // Whole key blocks, as they are gathered.
                let seen = (p.position(queries.end - 1) + 1).max(0) as usize;
                let last = seen.next_multiple_of(PlanGeometry::KEY_BLOCK) as i64 - 1;
                let mut pass = ChunkPass {
                    problem,
                    inputs,
                    saved,
                    bits: &bits,
                    head,
                    partial: Partial::new(RangeKeys::new(None, p.k_len, 0, last), p.head_dim),
                    bias: BiasRows::new(problem.bias.filter(|_| wanted), problem, head, &queries),
                };
                with_scratch(|scratch| pass.run(queries, &mut dq, scratch));
                (pass.partial, pass.bias)
            })
            .collect();
        for (partial, bias) in done {
            if let Some(dbias) = dbias.as_deref_mut() {
                bias.add_to(dbias);
            }
            partials.push(partial);
        }
        tasks = rest;
    }
    reduce(p, &partials, chunks, grads.k, grads.v, None);
}

/// The gradient of the biases that one chunk of queries reads.
struct BiasRows {
    /// `[heads, rows, keys]`, sizes of 1 for the axes that the bias broadcasts.
    sums: Vec<f32>,
    /// Heads of the group, or 1 if they share a bias.
    heads: usize,
    rows: usize,
    keys: usize,
    /// The first query; 0 if all share a bias.
    first: usize,
    /// Where the first of the rows lies in the bias, and how far apart the heads are.
    begin: usize,
    head_stride: usize,
}

impl BiasRows {
    /// No biases without a shape.
    fn new(
        shape: Option<[usize; 4]>,
        problem: &MaskedProblem,
        [batch, kv_head]: [usize; 2],
        queries: &Range<usize>,
    ) -> Self {
        let group = problem.attention.group();
        let [b, h, q, keys] = shape.unwrap_or([0; 4]);
        let each = problem.heads_each(h);
        let heads = if each >= group { 1 } else { group };
        let (rows, first) = if q == 1 {
            (1, 0)
        } else {
            (queries.len(), queries.start)
        };
        let batch = if b == 1 { 0 } else { batch };
        let head = kv_head * group / each;
        let len = if q == 0 { 0 } else { heads * rows * keys };
        Self {
            sums: vec![0.0; len],
            heads,
            rows,
            keys,
            first,
            begin: ((batch * h + head) * q + first) * keys,
            head_stride: q * keys,
        }
    }

    /// Adds the gradients of the logits of a tile, rows of `columns`, to what their biases are.
    fn add(&mut self, tile: &Range<usize>, keys: &MaskedKeys, dlogit: &[f32]) {
        if self.sums.is_empty() {
            return;
        }
        for (r, dlogit) in dlogit.chunks_exact(keys.columns).enumerate() {
            let (head, query) = (r / tile.len(), tile.start + r % tile.len());
            let head = if self.heads == 1 { 0 } else { head };
            let row = if self.rows == 1 {
                0
            } else {
                query - self.first
            };
            let sums = &mut self.sums[(head * self.rows + row) * self.keys..][..self.keys];
            if self.keys == 1 {
                sums[0] += dlogit.iter().sum::<f32>();
                continue;
            }
            let mut column = 0;
            for keys in &keys.keys {
                add_scaled(&mut sums[keys.clone()], 1.0, &dlogit[column..]);
                column += keys.len();
            }
        }
    }

    fn add_to(&self, dbias: &mut [f32]) {
        if self.sums.is_empty() {
            return;
        }
        let rows = self.rows * self.keys;
        for (head, sums) in self.sums.chunks_exact(rows).enumerate() {
            let begin = self.begin + head * self.head_stride;
            add_scaled(&mut dbias[begin..begin + rows], 1.0, sums);
        }
    }
}

struct ChunkPass<'a, E> {
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs<'a, E>,
    saved: &'a Saved<'a, E>,
    bits: &'a Bits<'a>,
    /// Batch and key/value head.
    head: [usize; 2],
    partial: Partial,
    bias: BiasRows,
}

impl<E: Element> ChunkPass<'_, E> {
    fn run(&mut self, queries: Range<usize>, dq: &mut [&mut [E]], scratch: &mut Scratch) {
        let p = &self.problem.attention;
        let dim = p.head_dim;
        for first in queries.clone().step_by(query_tile(p)) {
            let tile = first..queries.end.min(first + query_tile(p));
            let rows = p.group() * tile.len();
            load_gradient_tile(p, &self.inputs.q, self.saved, self.head, &tile, scratch);
            scratch.acc.get(rows * dim).fill(0.0);
            let mut seen = std::mem::take(&mut scratch.masked_blocks);
            seen.look(self.problem, self.bits, self.head, &tile);
            scratch.masked_blocks = seen;
            let spoilt = zero_spoilt_rows(rows, dim, scratch);
            let (count, step) = (
                scratch.masked_blocks.blocks.len(),
                blocks_at_once(self.problem),
            );
            for start in (0..count).step_by(step) {
                let blocks = start..count.min(start + step);
                self.block(&tile, blocks, &spoilt, scratch);
            }
            let lse = scratch.max.read(rows);
            let dq_rows = scratch.acc.get(rows * dim).chunks_exact_mut(dim);
            for (r, row) in dq_rows.enumerate() {
                if lse[r] == f32::NEG_INFINITY {
                    row.fill(0.0);
                }
                let i = tile.start - queries.start + r % tile.len();
                E::round(row, &mut dq[r / tile.len()][i * dim..(i + 1) * dim]);
            }
        }
    }

    /// Adds what the pairs of some key blocks contribute to every gradient.
    fn block(
        &mut self,
        tile: &Range<usize>,
        blocks: Range<usize>,
        spoilt: &[usize],
        scratch: &mut Scratch,
    ) {
        let (p, dim) = (&self.problem.attention, self.problem.attention.head_dim);
        let rows = p.group() * tile.len();
        let Scratch {
            masked_keys: keys,
            masked_blocks: seen,
            q,
            acc,
            p: weights,
            max,
            sum,
            grad_out,
            ds,
            dlogit,
            dk,
            dv,
            finite_q,
            finite_grad_out,
            ..
        } = scratch;
        keys.gather(self.problem, self.inputs, self.head, tile, seen, blocks);
        let columns = keys.columns;
        let (q, grad_out) = (q.read(rows * dim), grad_out.read(rows * dim));
        let acc = acc.get(rows * dim);
        let (weights, ds) = (weights.get(rows * columns), ds.get(rows * columns));
        let dlogit = dlogit.get(rows * columns);
        let (dk, dv) = (dk.get(columns * dim), dv.get(columns * dim));
        let by_columns = |rows| Matrix::rows(rows, dim).transposed();
        let sizes = [rows, columns, dim];
        let (left, right) = (Matrix::rows(q, dim), by_columns(keys.k.read(columns * dim)));
        product(sizes, weights, false, p.scale, left, right);
        let (left, right) = (
            Matrix::rows(grad_out, dim),
            by_columns(keys.v.read(columns * dim)),
        );
        product(sizes, ds, false, 1.0, left, right);
        run(GradientBlock {
            p: weights,
            ds,
            dlogit,
            keys,
            seen,
            softcap: p.softcap,
            lse: max.read(rows),
            delta: sum.read(rows),
        });
        self.bias.add(tile, keys, dlogit);
        let (finite_q, finite_grad_out) = if spoilt.is_empty() {
            (q, grad_out)
        } else {
            (finite_q.read(rows * dim), finite_grad_out.read(rows * dim))
        };
        let sizes = [columns, dim, rows];
        let by_rows = |weights| Matrix::rows(weights, columns).transposed();
        let right = Matrix::rows(finite_grad_out, dim);
        product(sizes, dv, false, 1.0, by_rows(weights), right);
        let right = Matrix::rows(finite_q, dim);
        product(sizes, dk, false, p.scale, by_rows(ds), right);
        for &r in spoilt {
            for column in (0..keys.len).filter(|&column| seen.sees(keys.first, r, column)) {
                let (pair, row) = (r * columns + column, column * dim..(column + 1) * dim);
                add_scaled(&mut dv[row.clone()], weights[pair], &grad_out[r * dim..]);
                add_scaled(&mut dk[row], p.scale * ds[pair], &q[r * dim..]);
            }
        }
        let mut column = 0;
        for range in &keys.keys {
            // Without intervals a key's slot is its index.
            let (from, to) = (column * dim, range.start * dim..range.end * dim);
            add_scaled(&mut self.partial.dk[to.clone()], 1.0, &dk[from..]);
            add_scaled(&mut self.partial.dv[to], 1.0, &dv[from..]);
            column += range.len();
        }
        // Keys with NaN or infinity that some row does not see, each on its own: in the matrix product they
        // would reach that row.
        for column in 0..if keys.full { 0 } else { keys.len } {
            let row = column * dim..(column + 1) * dim;
            if is_finite(&keys.k.read(columns * dim)[row.clone()]) {
                continue;
            }
            let key = keys.k.read(columns * dim)[row.clone()].to_vec();
            for (r, dq) in acc.chunks_exact_mut(dim).enumerate() {
                if seen.sees(keys.first, r, column) {
                    add_scaled(dq, p.scale * ds[r * columns + column], &key);
                }
            }
            keys.k.get(columns * dim)[row].fill(0.0);
        }
        let (left, right) = (Matrix::rows(ds, columns), keys.k.read(columns * dim));
        product(
            [rows, dim, columns],
            acc,
            true,
            p.scale,
            left,
            Matrix::rows(right, dim),
        );
    }
}

/// Rows of q or of the gradient of the output that hold NaN or infinity, if some block is not seen whole. In
/// a product over rows they would reach keys that they do not see: copies without them are made for those
/// products, and they are added on their own.
fn zero_spoilt_rows(rows: usize, dim: usize, scratch: &mut Scratch) -> Vec<usize> {
    if scratch.masked_blocks.blocks.iter().all(|(_, full)| *full) {
        return Vec::new();
    }
    crate::attention::backward::copy_finite_rows(rows, dim, scratch)
}

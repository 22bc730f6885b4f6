//! The backward pass: one pass over the query tiles, recomputing the probabilities from the LSE.
//!
//! A task is a chunk of the queries of one key/value head. It owns their rows of the gradient of q
//! and keeps f32 gradients of the keys it touches; a second step adds those of a head's chunks, in
//! order, so the result does not depend on the threads.

use crate::attention::forward::{keys_of, load_queries};
use crate::attention::schedule::{backward_chunks, key_block, query_tile, split_rows};
use crate::attention::softmax::GradientBlock;
use crate::gemm::{Matrix, product};
use crate::keys::intervals::RangeKeys;
use crate::scratch::{KeyBlock, Scratch, is_finite, with_scratch};
use crate::simd::run;
use crate::{Element, Gradients, Inputs, Problem, Saved, View};
use rayon::prelude::*;
use std::ops::Range;

/// Keys of a task of the second step.
const REDUCED_KEYS: usize = 256;

/// The whole pass, on checked arguments.
pub(crate) fn backward<E: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, E>,
    saved: &Saved<'_, E>,
    grads: Gradients<'_, E>,
) {
    let bounds = backward_chunks(problem);
    let chunks = bounds.len() - 1;
    let partials: Vec<Partial> = split_rows(grads.q, problem, &bounds, problem.head_dim)
        .into_par_iter()
        .enumerate()
        .with_max_len(1)
        .map(|(task, mut dq)| {
            let (head, chunk) = (task / chunks, task % chunks);
            let head = [head / problem.kv_heads, head % problem.kv_heads];
            let queries = bounds[chunk]..bounds[chunk + 1];
            let mut pass = ChunkPass {
                problem,
                inputs,
                saved,
                head,
                partial: Partial::new(keys_of(problem, inputs, head, &queries), problem.head_dim),
            };
            with_scratch(|scratch| pass.run(queries, &mut dq, scratch));
            pass.partial
        })
        .collect();
    reduce(problem, &partials, chunks, grads.k, grads.v, grads.scores);
}

/// Gradients of the keys that one chunk of queries touches, a row a slot.
pub(crate) struct Partial {
    keys: RangeKeys,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
    dz: Vec<f32>,
}

impl Partial {
    pub(crate) fn new(keys: RangeKeys, dim: usize) -> Self {
        let len = keys.len();
        Self {
            keys,
            dk: vec![0.0; len * dim],
            dv: vec![0.0; len * dim],
            dz: vec![0.0; len],
        }
    }
}

struct ChunkPass<'a, E> {
    problem: &'a Problem,
    inputs: &'a Inputs<'a, E>,
    saved: &'a Saved<'a, E>,
    /// Batch and key/value head.
    head: [usize; 2],
    partial: Partial,
}

impl<E: Element> ChunkPass<'_, E> {
    fn run(&mut self, queries: Range<usize>, dq: &mut [&mut [E]], scratch: &mut Scratch) {
        let dim = self.problem.head_dim;
        scratch.tile.restart();
        for first in queries.clone().step_by(query_tile(self.problem)) {
            let tile = first..queries.end.min(first + query_tile(self.problem));
            let rows = self.problem.group() * tile.len();
            let problem = self.problem;
            load_gradient_tile(
                problem,
                &self.inputs.q,
                self.saved,
                self.head,
                &tile,
                scratch,
            );
            scratch.acc.get(rows * dim).fill(0.0);
            let (first, last) = (
                self.problem.position(tile.start),
                self.problem.position(tile.end - 1),
            );
            scratch.tile.advance(&self.partial.keys, first, last);
            // In a product over rows, rows with NaN or infinity would reach the boundary keys that they do
            // not attend to, as `0 * NaN`: copies without them are made for those products, and they are
            // added on their own.
            let spoilt = if scratch.tile.full == scratch.tile.slots.len() {
                Vec::new()
            } else {
                copy_finite_rows(rows, dim, scratch)
            };
            let count = scratch.tile.slots.len();
            for start in (0..count).step_by(key_block(self.problem)) {
                let places = start..count.min(start + key_block(self.problem));
                self.block(tile.len(), places, &spoilt, scratch);
            }
            let lse = scratch.max.read(rows);
            for (r, row) in scratch
                .acc
                .get(rows * dim)
                .chunks_exact_mut(dim)
                .enumerate()
            {
                if lse[r] == f32::NEG_INFINITY {
                    row.fill(0.0);
                }
                let i = tile.start - queries.start + r % tile.len();
                E::round(row, &mut dq[r / tile.len()][i * dim..(i + 1) * dim]);
            }
        }
    }

    /// Adds what the pairs of one key block contribute to every gradient.
    fn block(
        &mut self,
        queries: usize,
        places: Range<usize>,
        spoilt: &[usize],
        scratch: &mut Scratch,
    ) {
        let (problem, dim) = (self.problem, self.problem.head_dim);
        let rows = problem.group() * queries;
        let Scratch {
            tile,
            block,
            q,
            acc,
            p,
            max,
            sum,
            grad_out,
            ds,
            dk,
            dv,
            dz,
            finite_q,
            finite_grad_out,
            ..
        } = scratch;
        let keys = &self.partial.keys;
        block.gather(problem, self.inputs, self.head, keys, tile, places.clone());
        let columns = block.columns;
        let (q, grad_out) = (q.read(rows * dim), grad_out.read(rows * dim));
        let acc = acc.get(rows * dim);
        let (p, ds) = (p.get(rows * columns), ds.get(rows * columns));
        let (dk, dv) = (dk.get(columns * dim), dv.get(columns * dim));
        let dz = dz.get(columns);
        let columns_by_dim = |rows| Matrix::rows(rows, dim).transposed();
        let (k, v) = (block.k.read(columns * dim), block.v.read(columns * dim));
        product(
            [rows, columns, dim],
            p,
            false,
            problem.scale,
            Matrix::rows(q, dim),
            columns_by_dim(k),
        );
        product(
            [rows, columns, dim],
            ds,
            false,
            1.0,
            Matrix::rows(grad_out, dim),
            columns_by_dim(v),
        );
        run(GradientBlock {
            p,
            ds,
            block,
            queries,
            softcap: problem.softcap,
            lse: max.read(rows),
            delta: sum.read(rows),
            dz,
        });
        let (finite_q, finite_grad_out) = if spoilt.is_empty() {
            (q, grad_out)
        } else {
            (finite_q.read(rows * dim), finite_grad_out.read(rows * dim))
        };
        product(
            [columns, dim, rows],
            dv,
            false,
            1.0,
            Matrix::rows(p, columns).transposed(),
            Matrix::rows(finite_grad_out, dim),
        );
        product(
            [columns, dim, rows],
            dk,
            false,
            problem.scale,
            Matrix::rows(ds, columns).transposed(),
            Matrix::rows(finite_q, dim),
        );
        for &r in spoilt {
            for column in (0..block.len).filter(|&c| block.attends(r % queries, c)) {
                let pair = r * columns + column;
                let row = column * dim..(column + 1) * dim;
                add_scaled(&mut dv[row.clone()], p[pair], &grad_out[r * dim..]);
                add_scaled(&mut dk[row], problem.scale * ds[pair], &q[r * dim..]);
            }
        }
        add_key_products(problem, block, queries, ds, acc);
        for (column, &slot) in tile.slots[places].iter().enumerate() {
            let (slot, row) = (slot as usize, column * dim..(column + 1) * dim);
            let sum = slot * dim..(slot + 1) * dim;
            add_scaled(&mut self.partial.dk[sum.clone()], 1.0, &dk[row.clone()]);
            add_scaled(&mut self.partial.dv[sum], 1.0, &dv[row]);
            self.partial.dz[slot] += dz[column];
        }
    }
}

/// Loads q, the gradient of the output, the LSE and `delta` of a tile, row `h * tile.len() + i`
/// being query `i` of head `h` of the group. A row that attends to nothing is loaded as zeros.
pub(crate) fn load_gradient_tile<E: Element>(
    problem: &Problem,
    query: &View<'_, E, 4>,
    saved: &Saved<'_, E>,
    head: [usize; 2],
    tile: &Range<usize>,
    scratch: &mut Scratch,
) {
    let (dim, group) = (problem.head_dim, problem.group());
    let rows = group * tile.len();
    load_queries(problem, query, head, tile, &mut scratch.q);
    load_queries(problem, &saved.grad_out, head, tile, &mut scratch.grad_out);
    load_queries(problem, &saved.out, head, tile, &mut scratch.acc);
    let q = scratch.q.get(rows * dim);
    let grad_out = scratch.grad_out.get(rows * dim);
    let out = scratch.acc.read(rows * dim);
    let (lse, delta) = (scratch.max.get(rows), scratch.sum.get(rows));
    for r in 0..rows {
        let h = head[1] * group + r / tile.len();
        let i = tile.start + r % tile.len();
        let at = (head[0] * problem.q_heads + h) * problem.q_len + i;
        let row = r * dim..(r + 1) * dim;
        lse[r] = saved.lse[at];
        if lse[r] == f32::NEG_INFINITY {
            q[row.clone()].fill(0.0);
            grad_out[row].fill(0.0);
            delta[r] = 0.0;
            continue;
        }
        let dot: f32 = (grad_out[row.clone()].iter().zip(&out[row]))
            .map(|(g, o)| g * o)
            .sum();
        delta[r] = dot - saved.grad_lse.map_or(0.0, |grad| grad[at]);
    }
}

/// Rows of q or of the gradient of the output that hold NaN or infinity. If there are some, copies of both
/// with zeros for them are left in the scratch memory.
pub(crate) fn copy_finite_rows(rows: usize, dim: usize, scratch: &mut Scratch) -> Vec<usize> {
    let (q, grad_out) = (
        scratch.q.read(rows * dim),
        scratch.grad_out.read(rows * dim),
    );
    let spoilt: Vec<usize> = (0..rows)
        .filter(|r| {
            let row = r * dim..(r + 1) * dim;
            !is_finite(&q[row.clone()]) || !is_finite(&grad_out[row])
        })
        .collect();
    if !spoilt.is_empty() {
        let finite_q = scratch.finite_q.get(rows * dim);
        let finite_grad_out = scratch.finite_grad_out.get(rows * dim);
        finite_q.copy_from_slice(q);
        finite_grad_out.copy_from_slice(grad_out);
        for r in &spoilt {
            finite_q[r * dim..(r + 1) * dim].fill(0.0);
            finite_grad_out[r * dim..(r + 1) * dim].fill(0.0);
        }
    }
    spoilt
}

/// `dq += scale * ds k`, the boundary keys with NaN or infinity each on its own: in the matrix
/// product they would reach queries that do not attend to them.
fn add_key_products(
    problem: &Problem,
    block: &mut KeyBlock,
    queries: usize,
    ds: &[f32],
    dq: &mut [f32],
) {
    let (dim, columns) = (problem.head_dim, block.columns);
    for column in block.boundary() {
        let row = column * dim..(column + 1) * dim;
        if is_finite(&block.k.read(columns * dim)[row.clone()]) {
            continue;
        }
        let key = block.k.read(columns * dim)[row.clone()].to_vec();
        for (r, dq) in dq.chunks_exact_mut(dim).enumerate() {
            if block.attends(r % queries, column) {
                add_scaled(dq, problem.scale * ds[r * columns + column], &key);
            }
        }
        block.k.get(columns * dim)[row].fill(0.0);
    }
    product(
        [ds.len() / columns, dim, columns],
        dq,
        true,
        problem.scale,
        Matrix::rows(ds, columns),
        Matrix::rows(block.k.read(columns * dim), dim),
    );
}

/// `target += factor * source`, over the length of `target`.
#[inline]
pub(crate) fn add_scaled(target: &mut [f32], factor: f32, source: &[f32]) {
    for (target, source) in target.iter_mut().zip(source) {
        *target += factor * source;
    }
}

/// Adds the chunks of each key/value head in order and writes the gradients of the keys; a key that
/// no chunk touched gets zeros.
pub(crate) fn reduce<E: Element>(
    problem: &Problem,
    partials: &[Partial],
    chunks: usize,
    dk: &mut [E],
    dv: &mut [E],
    dz: Option<&mut [f32]>,
) {
    let (dim, k_len) = (problem.head_dim, problem.k_len);
    if k_len == 0 {
        return;
    }
    let mut tasks = Vec::new();
    let heads = (dk.chunks_exact_mut(k_len * dim)).zip(dv.chunks_exact_mut(k_len * dim));
    for (head, (dk, dv)) in heads.enumerate() {
        let partials = &partials[head * chunks..(head + 1) * chunks];
        let keys = REDUCED_KEYS * dim;
        for (n, (dk, dv)) in dk.chunks_mut(keys).zip(dv.chunks_mut(keys)).enumerate() {
            tasks.push((partials, n * REDUCED_KEYS, dk, dv));
        }
    }
    tasks.into_par_iter().for_each(|(partials, first, dk, dv)| {
        let keys = first..first + dk.len() / dim;
        let mut sum = vec![0.0; dk.len()];
        let mut reduce = |target: &mut [E], rows: fn(&Partial) -> &[f32]| {
            sum.fill(0.0);
            for partial in partials {
                let slots = slots_of(partial, &keys);
                let rows = rows(partial)[slots.start * dim..slots.end * dim].chunks_exact(dim);
                for (&key, row) in partial.keys.index[slots].iter().zip(rows) {
                    add_scaled(&mut sum[(key as usize - first) * dim..][..dim], 1.0, row);
                }
            }
            E::round(&sum, target);
        };
        reduce(dk, |partial| &partial.dk);
        reduce(dv, |partial| &partial.dv);
    });
    if let Some(dz) = dz {
        for (head, dz) in dz.chunks_exact_mut(k_len).enumerate() {
            dz.fill(0.0);
            for partial in &partials[head * chunks..(head + 1) * chunks] {
                for (&key, x) in partial.keys.index.iter().zip(&partial.dz) {
                    dz[key as usize] += x;
                }
            }
        }
    }
}

/// The slots of the keys of a range.
fn slots_of(partial: &Partial, keys: &Range<usize>) -> Range<usize> {
    let slot = |key: usize| (partial.keys.index).partition_point(|&index| (index as usize) < key);
    slot(keys.start)..slot(keys.end)
}

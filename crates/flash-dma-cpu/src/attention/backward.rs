//! The backward pass: one pass over the query tiles, recomputing the probabilities from the LSE.
//!
//! A task is a chunk of the queries of one key/value head. It owns their rows of the gradient of q
//! and keeps f32 gradients of the keys it touches; a second step adds those of a head's chunks, in
//! order, so the result does not depend on the threads.

use super::bias_gradient::{
    AllLogits, BiasGradient, BiasSums, ColumnSums, LogitGradients, NoLogits,
};
use super::dropout::DropoutWords;
use super::key_gradient::{KeyGradients, reduce};
use super::schedule::{Chunks, key_block, query_tile};
use super::softmax::{GradientBlock, RowLse};
use crate::args::Saved;
use crate::element::Element;
use crate::gemm::{Matrix, Product};
use crate::keys::block::{BlockBuffers, KeyBlock};
use crate::keys::operands::{KeyRows, Operands};
use crate::keys::tile::TileKeys;
use crate::queries::QueryRows;
use crate::scratch::Buffer;
use crate::simd::{add_scaled, is_finite, run};
use flash_dma_problem::Problem;
use rayon::prelude::*;
use std::ops::Range;

/// The gradients to write; every slice is contiguous and overwritten.
pub(crate) struct Targets<'a, E> {
    pub(crate) q: &'a mut [E],
    pub(crate) k: &'a mut [E],
    pub(crate) v: &'a mut [E],
    pub(crate) bias: BiasGradient<'a>,
}

/// Runs the whole pass, on checked arguments.
pub(crate) fn backward<E: Element, R: KeyRows<E>>(
    operands: &Operands<'_, E, R>,
    saved: &Saved<'_, E>,
    targets: Targets<'_, E>,
) {
    let problem = operands.problem;
    let chunks = Chunks::backward(problem);
    let mut dbias = targets.bias;
    dbias.clear();
    let mut tasks: Vec<_> = (chunks.split(targets.q, problem.head_dim).into_iter())
        .enumerate()
        .collect();
    let at_once = dbias.tasks_at_once(problem, tasks.len(), chunks.per_head());
    let mut partials = Vec::new();
    while !tasks.is_empty() {
        let rest = tasks.split_off(at_once.min(tasks.len()));
        let done: Vec<(KeyGradients, BiasSums)> = (tasks.into_par_iter())
            .with_max_len(1)
            .map(|(task, dq)| {
                let chunk = chunks.rows(task);
                ChunkPass::new(operands, saved, &chunk, &dbias).run(&chunk, dq)
            })
            .collect();
        for (partial, sums) in done {
            let head = partials.len() / chunks.per_head();
            dbias.add(problem, head, &sums, &partial.index);
            partials.push(partial);
        }
        tasks = rest;
    }
    let of_keys = [targets.k, targets.v];
    reduce(problem, &partials, chunks.per_head(), of_keys);
}

struct ChunkPass<'a, E, R> {
    operands: &'a Operands<'a, E, R>,
    saved: &'a Saved<'a, E>,
    keys: TileKeys<'a>,
    tile: GradientTile,
    pairs: PairGradients,
    /// `[columns, head_dim]`: one block's gradients of K and V.
    block_dk: Buffer,
    block_dv: Buffer,
    /// The gradients of one block's logits, or their sums over the rows.
    logits: Buffer,
    /// `[entries, head_dim]`: the gradients of the chunk's keys.
    dk: Vec<f32>,
    dv: Vec<f32>,
    dbias: BiasSums,
}

impl<'a, E: Element, R: KeyRows<E>> ChunkPass<'a, E, R> {
    fn new(
        operands: &'a Operands<'a, E, R>,
        saved: &'a Saved<'a, E>,
        chunk: &QueryRows,
        dbias: &BiasGradient<'_>,
    ) -> Self {
        let problem = operands.problem;
        let keys = TileKeys::new(&operands.source, problem, chunk);
        let count = keys.list().index.len();
        Self {
            operands,
            saved,
            keys,
            tile: GradientTile::default(),
            pairs: PairGradients::default(),
            block_dk: Buffer::default(),
            block_dv: Buffer::default(),
            logits: Buffer::default(),
            dk: vec![0.0; count * problem.head_dim],
            dv: vec![0.0; count * problem.head_dim],
            dbias: dbias.of_chunk(chunk, count),
        }
    }

    /// Writes the gradient of the chunk's queries, a slice for each head of the group, and returns the other gradients.
    fn run(mut self, chunk: &QueryRows, mut dq: Vec<&mut [E]>) -> (KeyGradients, BiasSums) {
        let problem = self.operands.problem;
        let mut buffers = BlockBuffers::default();
        for rows in chunk.tiles(query_tile(problem)) {
            self.keys.advance(&rows);
            self.tile.load(self.operands, self.saved, &rows);
            if let BiasSums::Rows(sums) = &mut self.dbias {
                sums.add_rows(&rows, self.tile.lse_gradients(self.saved, &rows, problem));
            }
            if self.keys.is_full() {
                self.tile.non_finite.clear();
            } else {
                self.tile.copy_finite_rows(&rows, problem.head_dim);
            }
            for places in self.keys.blocks(key_block(problem)) {
                self.block(&rows, places, &mut buffers);
            }
            self.tile.write(&rows, chunk, problem.head_dim, &mut dq);
        }
        let partial = KeyGradients {
            index: self.keys.into_index(),
            dk: self.dk,
            dv: self.dv,
        };
        (partial, self.dbias)
    }

    /// Adds the contributions of one key block's pairs to every gradient.
    fn block(&mut self, rows: &QueryRows, places: Range<usize>, buffers: &mut BlockBuffers) {
        let problem = self.operands.problem;
        let dim = problem.head_dim;
        let mut block = buffers.gather(self.operands, rows, &self.keys, places);
        let (tile, pairs) = (&mut self.tile, &mut self.pairs);
        pairs.multiply(problem, tile, &block);
        match &mut self.dbias {
            BiasSums::Ignored | BiasSums::Rows(_) => {
                pairs.differentiate(problem, tile, &block, NoLogits)
            }
            BiasSums::PerKey(sums) => {
                let dz = self.logits.get(block.columns);
                pairs.differentiate(problem, tile, &block, ColumnSums::new(dz));
                for (column, &entry) in block.entries.iter().enumerate() {
                    sums[entry as usize] += dz[column];
                }
            }
            BiasSums::Broadcast(sums) => {
                let dlogit = self.logits.get(tile.rows * block.columns);
                pairs.differentiate(problem, tile, &block, AllLogits::new(dlogit));
                sums.add(rows, &block, dlogit);
            }
        }
        let dk = self.block_dk.get(block.columns * dim);
        let dv = self.block_dv.get(block.columns * dim);
        pairs.write_key_gradients(problem, tile, &block, [dk, dv]);
        for (column, &entry) in block.entries.iter().enumerate() {
            let row = column * dim..(column + 1) * dim;
            let sum = entry as usize * dim..(entry as usize + 1) * dim;
            add_scaled(&mut self.dk[sum.clone()], 1.0, &dk[row.clone()]);
            add_scaled(&mut self.dv[sum], 1.0, &dv[row]);
        }
        pairs.add_query_gradients(problem, &mut block, tile);
    }
}

/// The index of a tile's row in the LSE.
pub(super) fn row_of(rows: &QueryRows, r: usize, problem: &Problem) -> usize {
    let head = rows.kv_head.batch * problem.q_heads + rows.q_head(r);
    head * problem.q_len + rows.query(r)
}

#[derive(Default)]
pub(super) struct GradientTile {
    pub(super) rows: usize,
    /// `[rows, head_dim]`: queries.
    q: Buffer,
    /// `[rows, head_dim]`: gradient of the output.
    grad_out: Buffer,
    /// `[rows, head_dim]`: the output at first, then the gradient of q.
    dq: Buffer,
    /// `[rows, head_dim]`: the residual of the output, if there is one.
    residual: Buffer,
    pub(super) lse: LseBuffers,
    /// `[rows]`: `sum(grad_out * out) - grad_lse`.
    pub(super) delta: Buffer,
    /// Rows of q or of the gradient of the output that hold NaN or infinity.
    non_finite: Vec<usize>,
    dropout: DropoutWords,
    /// If there are some: q and the gradient of the output, with zeros in those rows.
    finite_q: Buffer,
    finite_grad_out: Buffer,
}

impl GradientTile {
    /// Loads a tile; the gradient of q is zero. A row that attends to nothing is loaded as zeros.
    pub(super) fn load<E: Element, R>(
        &mut self,
        operands: &Operands<'_, E, R>,
        saved: &Saved<'_, E>,
        rows: &QueryRows,
    ) {
        let problem = operands.problem;
        let dim = problem.head_dim;
        self.rows = rows.len();
        self.dropout.set_rows(problem, rows);
        rows.widen(&operands.q, &mut self.q);
        rows.widen(&saved.grad_out, &mut self.grad_out);
        rows.widen(&saved.out, &mut self.dq);
        let q = self.q.get(rows.len() * dim);
        let grad_out = self.grad_out.get(rows.len() * dim);
        let out = self.dq.get(rows.len() * dim);
        if let Some(residual) = &saved.residual {
            rows.widen(residual, &mut self.residual);
            add_scaled(out, 1.0, self.residual.read(rows.len() * dim));
        }
        let (lse, rest) = (self.lse.lse.get(rows.len()), self.lse.rest.get(rows.len()));
        let delta = self.delta.get(rows.len());
        for r in 0..rows.len() {
            let at = row_of(rows, r, problem);
            let row = r * dim..(r + 1) * dim;
            lse[r] = saved.lse[at];
            rest[r] = saved.lse_rest.map_or(0.0, |rest| rest[at]);
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
        out.fill(0.0);
    }

    /// The sum of the gradients of each row's logits: the gradient of its LSE, zero if it attends to nothing, and NaN
    /// if it has numbers that are not finite, as its pairs have.
    fn lse_gradients<'a, E>(
        &'a self,
        saved: &'a Saved<'_, E>,
        rows: &'a QueryRows,
        problem: &'a Problem,
    ) -> impl Iterator<Item = f32> + 'a {
        let (lse, delta) = (self.lse.read(self.rows), self.delta.read(self.rows));
        (lse.lse.iter().zip(delta).enumerate()).map(|(r, (lse, delta))| {
            let own = (saved.grad_lse).map_or(0.0, |grad| grad[row_of(rows, r, problem)]);
            match lse.is_finite() && (delta.is_finite() || !own.is_finite()) {
                _ if *lse == f32::NEG_INFINITY => 0.0,
                true => own,
                false => f32::NAN,
            }
        })
    }

    /// Makes the copies without NaN and infinity. In a product over rows, rows with them would reach the boundary keys
    /// that they do not attend to, as `0 * NaN`: the copies are multiplied, and those rows are added separately.
    fn copy_finite_rows(&mut self, rows: &QueryRows, dim: usize) {
        let len = rows.len() * dim;
        let (q, grad_out) = (self.q.read(len), self.grad_out.read(len));
        self.non_finite.clear();
        self.non_finite.extend((0..rows.len()).filter(|r| {
            let row = r * dim..(r + 1) * dim;
            !is_finite(&q[row.clone()]) || !is_finite(&grad_out[row])
        }));
        if self.non_finite.is_empty() {
            return;
        }
        let (finite_q, finite_grad_out) = (self.finite_q.get(len), self.finite_grad_out.get(len));
        finite_q.copy_from_slice(q);
        finite_grad_out.copy_from_slice(grad_out);
        for r in &self.non_finite {
            finite_q[r * dim..(r + 1) * dim].fill(0.0);
            finite_grad_out[r * dim..(r + 1) * dim].fill(0.0);
        }
    }

    fn write<E: Element>(
        &mut self,
        rows: &QueryRows,
        chunk: &QueryRows,
        dim: usize,
        target: &mut [&mut [E]],
    ) {
        let lse = self.lse.read(rows.len());
        let dq = self.dq.get(rows.len() * dim);
        for (r, row) in dq.chunks_exact_mut(dim).enumerate() {
            if lse.attends_to_nothing(r) {
                row.fill(0.0);
            }
            let (h, i) = rows.place_in(chunk, r);
            E::round(row, &mut target[h][i * dim..(i + 1) * dim]);
        }
    }
}

#[derive(Default)]
pub(super) struct LseBuffers {
    lse: Buffer,
    rest: Buffer,
}

impl LseBuffers {
    pub(super) fn read(&self, rows: usize) -> RowLse<'_> {
        RowLse {
            lse: self.lse.read(rows),
            rest: self.rest.read(rows),
        }
    }
}

/// The pairs of a tile's rows and a block's keys.
#[derive(Default)]
pub(super) struct PairGradients {
    /// `[rows, columns]`: scaled products, then probabilities.
    pub(super) p: Buffer,
    /// `[rows, columns]`: gradient of the probabilities, then of the scaled products.
    pub(super) ds: Buffer,
}

impl PairGradients {
    /// The scaled products, and the gradients of the probabilities.
    pub(super) fn multiply(
        &mut self,
        problem: &Problem,
        tile: &GradientTile,
        block: &KeyBlock<'_>,
    ) {
        let (dim, len) = (problem.head_dim, tile.rows * block.columns);
        let rows = |buffer| Matrix::rows(Buffer::read(buffer, tile.rows * dim), dim);
        let (k, v) = (Matrix::rows(block.k, dim), Matrix::rows(block.v, dim));
        Product::scaled(problem.scale, rows(&tile.q), k.transposed()).write_to(self.p.get(len));
        Product::new(rows(&tile.grad_out), v.transposed()).write_to(self.ds.get(len));
    }

    /// The probabilities, and the gradients of the scaled products.
    fn differentiate(
        &mut self,
        problem: &Problem,
        tile: &mut GradientTile,
        block: &KeyBlock<'_>,
        logits: impl LogitGradients,
    ) {
        let len = tile.rows * block.columns;
        run(GradientBlock {
            p: self.p.get(len),
            ds: self.ds.get(len),
            block,
            softcap: problem.softcap,
            dropout: tile.dropout.of_block(problem, block),
            lse: tile.lse.read(tile.rows),
            delta: tile.delta.read(tile.rows),
            logits,
        });
    }

    fn write_key_gradients(
        &self,
        problem: &Problem,
        tile: &GradientTile,
        block: &KeyBlock<'_>,
        [dk, dv]: [&mut [f32]; 2],
    ) {
        let (dim, columns) = (problem.head_dim, block.columns);
        let p = self.p.read(tile.rows * columns);
        let ds = self.ds.read(tile.rows * columns);
        let q = tile.q.read(tile.rows * dim);
        let grad_out = tile.grad_out.read(tile.rows * dim);
        let (finite_q, finite_grad_out) = if tile.non_finite.is_empty() {
            (q, grad_out)
        } else {
            let len = tile.rows * dim;
            (tile.finite_q.read(len), tile.finite_grad_out.read(len))
        };
        let by_key = |pairs| Matrix::rows(pairs, columns).transposed();
        Product::new(by_key(p), Matrix::rows(finite_grad_out, dim)).write_to(dv);
        Product::scaled(problem.scale, by_key(ds), Matrix::rows(finite_q, dim)).write_to(dk);
        for &r in &tile.non_finite {
            for column in (0..block.len()).filter(|&column| block.attends(r, column)) {
                let (pair, row) = (r * columns + column, column * dim..(column + 1) * dim);
                add_scaled(&mut dv[row.clone()], p[pair], &grad_out[r * dim..]);
                add_scaled(&mut dk[row], problem.scale * ds[pair], &q[r * dim..]);
            }
        }
    }

    /// `dq += scale * ds k`, with each boundary key that has NaN or infinity added separately: in the matrix product
    /// they would reach queries that do not attend to them.
    fn add_query_gradients(
        &self,
        problem: &Problem,
        block: &mut KeyBlock<'_>,
        tile: &mut GradientTile,
    ) {
        let (dim, columns) = (problem.head_dim, block.columns);
        let ds = self.ds.read(tile.rows * columns);
        let dq = tile.dq.get(tile.rows * dim);
        for column in block.boundary() {
            let row = column * dim..(column + 1) * dim;
            if is_finite(&block.k[row.clone()]) {
                continue;
            }
            let key = block.k[row.clone()].to_vec();
            for (r, dq) in dq.chunks_exact_mut(dim).enumerate() {
                if block.attends(r, column) {
                    add_scaled(dq, problem.scale * ds[r * columns + column], &key);
                }
            }
            block.k[row].fill(0.0);
        }
        let (ds, k) = (Matrix::rows(ds, columns), Matrix::rows(block.k, dim));
        Product::scaled(problem.scale, ds, k).add_to(dq);
    }
}

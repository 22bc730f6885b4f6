//! The forward pass: online softmax over gathered blocks of keys.

use super::dropout::DropoutWords;
use super::schedule::{Chunks, key_block, query_tile};
use super::softmax::SoftmaxBlock;
use crate::args::Outputs;
use crate::element::Element;
use crate::gemm::{Matrix, Product};
use crate::keys::block::{BlockBuffers, KeyBlock};
use crate::keys::operands::{KeyRows, Operands};
use crate::keys::tile::TileKeys;
use crate::queries::QueryRows;
use crate::scratch::Buffer;
use crate::simd::{is_finite, run};
use flash_dma_problem::Problem;
use rayon::prelude::*;

/// Runs the whole pass, on checked arguments. One task is a chunk of the queries of one key/value head, with all query
/// heads of its group; it owns their rows of the outputs.
pub(crate) fn forward<E: Element, R: KeyRows<E>>(
    operands: &Operands<'_, E, R>,
    outputs: Outputs<'_, E>,
) {
    let problem = operands.problem;
    let chunks = Chunks::forward(problem);
    let outs = chunks.split(outputs.out, problem.head_dim);
    let residuals: Vec<_> = match outputs.residual {
        Some(residual) => (chunks.split(residual, problem.head_dim).into_iter())
            .map(Some)
            .collect(),
        None => outs.iter().map(|_| None).collect(),
    };
    let rests: Vec<_> = match outputs.lse_rest {
        Some(rest) => chunks.split(rest, 1).into_iter().map(Some).collect(),
        None => outs.iter().map(|_| None).collect(),
    };
    (outs.into_par_iter())
        .zip(residuals)
        .zip(chunks.split(outputs.lse, 1))
        .zip(rests)
        .enumerate()
        .with_max_len(1)
        .for_each(|(task, (((out, residual), lse), lse_rest))| {
            let outputs = ChunkOutputs {
                out,
                residual,
                lse,
                lse_rest,
            };
            attend_chunk(operands, &chunks.rows(task), outputs);
        });
}

/// The rows of the outputs that a chunk owns, a slice for each head of the group.
struct ChunkOutputs<'a, E> {
    out: Vec<&'a mut [E]>,
    residual: Option<Vec<&'a mut [E]>>,
    lse: Vec<&'a mut [f32]>,
    lse_rest: Option<Vec<&'a mut [f32]>>,
}

fn attend_chunk<E: Element, R: KeyRows<E>>(
    operands: &Operands<'_, E, R>,
    chunk: &QueryRows,
    mut outputs: ChunkOutputs<'_, E>,
) {
    let problem = operands.problem;
    let mut keys = TileKeys::new(&operands.source, problem, chunk);
    let mut buffers = BlockBuffers::default();
    let mut tile = OutputTile::default();
    for rows in chunk.tiles(query_tile(problem)) {
        keys.advance(&rows);
        rows.widen(&operands.q, &mut tile.q);
        tile.clear(rows.len(), problem.head_dim);
        tile.dropout.set_rows(problem, &rows);
        for places in keys.blocks(key_block(problem)) {
            let block = buffers.gather(operands, &rows, &keys, places);
            tile.attend(problem, rows.len(), block);
        }
        tile.write(&rows, chunk, problem.head_dim, &mut outputs);
    }
}

/// A tile's outputs while its keys come block by block.
#[derive(Default)]
struct OutputTile {
    /// `[rows, head_dim]`: queries.
    q: Buffer,
    /// `[rows, head_dim]`: the outputs, not normalised.
    acc: Buffer,
    /// `[rows]`: running maximum of the logits.
    max: Buffer,
    /// `[rows]`: running sum of the exponentials.
    sum: Buffer,
    /// `[rows, columns]`: logits, then probabilities of one block.
    p: Buffer,
    /// `[head_dim]`: a rounded row of the output.
    rounded: Buffer,
    dropout: DropoutWords,
}

impl OutputTile {
    fn clear(&mut self, rows: usize, dim: usize) {
        self.acc.get(rows * dim).fill(0.0);
        self.max.get(rows).fill(f32::NEG_INFINITY);
        self.sum.get(rows).fill(0.0);
    }

    fn attend(&mut self, problem: &Problem, rows: usize, mut block: KeyBlock<'_>) {
        let (dim, columns) = (problem.head_dim, block.columns);
        let acc = self.acc.get(rows * dim);
        let p = self.p.get(rows * columns);
        let non_finite = take_non_finite_values(&mut block, dim);
        let q = Matrix::rows(self.q.read(rows * dim), dim);
        let k = Matrix::rows(block.k, dim);
        Product::scaled(problem.scale, q, k.transposed()).write_to(p);
        run(SoftmaxBlock {
            p,
            block: &block,
            softcap: problem.softcap,
            dropout: self.dropout.of_block(problem, &block),
            max: self.max.get(rows),
            sum: self.sum.get(rows),
            acc,
        });
        Product::new(Matrix::rows(p, columns), Matrix::rows(block.v, dim)).add_to(acc);
        for (column, value) in non_finite {
            for r in (0..rows).filter(|&r| block.attends(r, column)) {
                let p = p[r * columns + column];
                for (acc, v) in acc[r * dim..(r + 1) * dim].iter_mut().zip(&value) {
                    *acc += p * v;
                }
            }
        }
    }

    fn write<E: Element>(
        &mut self,
        rows: &QueryRows,
        chunk: &QueryRows,
        dim: usize,
        outputs: &mut ChunkOutputs<'_, E>,
    ) {
        let acc = self.acc.get(rows.len() * dim);
        let (max, sum) = (self.max.read(rows.len()), self.sum.read(rows.len()));
        for (r, acc) in acc.chunks_exact_mut(dim).enumerate() {
            let (h, i) = rows.place_in(chunk, r);
            // A sum of exactly 0: nothing selected, or every selected logit is -inf.
            let rest;
            if sum[r] == 0.0 {
                acc.fill(0.0);
                (outputs.lse[h][i], rest) = (f32::NEG_INFINITY, 0.0);
            } else {
                for x in acc.iter_mut() {
                    *x /= sum[r];
                }
                (outputs.lse[h][i], rest) = rounded_sum(max[r], sum[r].ln());
            }
            if let Some(lse_rest) = &mut outputs.lse_rest {
                lse_rest[h][i] = rest;
            }
            let out = &mut outputs.out[h][i * dim..(i + 1) * dim];
            E::round(acc, out);
            if let Some(residual) = &mut outputs.residual {
                let rounded = self.rounded.get(dim);
                E::widen(out, rounded);
                for (x, rounded) in acc.iter_mut().zip(rounded.iter()) {
                    // If f16 rounds to NaN or infinity, there is no residual.
                    let lost = *x - rounded;
                    *x = if rounded.is_finite() { lost } else { 0.0 };
                }
                E::round(acc, &mut residual[h][i * dim..(i + 1) * dim]);
            }
        }
    }
}

/// The sum of a row's greatest logit and the logarithm of its sum of exponentials, and the rounding error of it.
fn rounded_sum(max: f32, ln_sum: f32) -> (f32, f32) {
    let lse = max + ln_sum;
    let rest = ln_sum - (lse - max);
    (lse, if lse.is_finite() { rest } else { 0.0 })
}

/// Takes the value rows with NaN or infinity out of the boundary columns: in the matrix product they would reach
/// queries that do not attend to them, as `0 * NaN`. They are added separately.
fn take_non_finite_values(block: &mut KeyBlock<'_>, dim: usize) -> Vec<(usize, Vec<f32>)> {
    let mut taken = Vec::new();
    for column in block.boundary() {
        let row = &mut block.v[column * dim..(column + 1) * dim];
        if !is_finite(row) {
            taken.push((column, row.to_vec()));
            row.fill(0.0);
        }
    }
    taken
}

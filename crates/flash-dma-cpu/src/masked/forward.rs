//! The forward pass: online softmax over the key blocks that a query tile sees.

use super::softmax::SoftmaxBlock;
use crate::attention::forward::{finish_tile, load_queries};
use crate::attention::schedule::{forward_chunks, key_block, query_tile, split_rows};
use crate::gemm::{Matrix, product};
use crate::keys::planned::{MaskedKeys, TileBlocks};
use crate::masked_args::MaskedInputs;
use crate::scratch::{Scratch, is_finite, with_scratch};
use crate::simd::run;
use crate::tile_plan::pack::Bits;
use crate::{Element, MaskedProblem, PlanGeometry};
use rayon::prelude::*;
use std::ops::Range;

/// The whole pass, on checked arguments. One task is a chunk of the queries of one key/value head, with all
/// query heads of its group; it owns their rows of `out` and `lse`.
pub(crate) fn forward<E: Element>(
    problem: &MaskedProblem,
    inputs: &MaskedInputs<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) {
    let p = &problem.attention;
    let bounds = forward_chunks(p);
    let chunks = bounds.len() - 1;
    let bits = Bits::of(problem, inputs.bits);
    split_rows(out, p, &bounds, p.head_dim)
        .into_par_iter()
        .zip(split_rows(lse, p, &bounds, 1))
        .enumerate()
        .with_max_len(1)
        .for_each(|(task, (mut out, mut lse))| {
            let (head, chunk) = (task / chunks, task % chunks);
            let head = [head / p.kv_heads, head % p.kv_heads];
            let queries = bounds[chunk]..bounds[chunk + 1];
            with_scratch(|scratch| {
                for first in queries.clone().step_by(query_tile(p)) {
                    let tile = first..queries.end.min(first + query_tile(p));
                    attend_tile(problem, inputs, &bits, head, &tile, scratch);
                    let rows = tile.start - queries.start..tile.end - queries.start;
                    finish_tile(p, rows, &mut out, &mut lse, scratch);
                }
            });
        });
}

/// Key blocks that are gathered at once.
pub(crate) fn blocks_at_once(problem: &MaskedProblem) -> usize {
    key_block(&problem.attention) / PlanGeometry::KEY_BLOCK
}

/// Leaves the unnormalised outputs of the queries `tile` in `scratch.acc`, row `h * tile.len() + i` being
/// query `i` of head `h` of the group, and their maxima and sums beside them.
fn attend_tile<E: Element>(
    problem: &MaskedProblem,
    inputs: &MaskedInputs<'_, E>,
    bits: &Bits<'_>,
    head: [usize; 2],
    tile: &Range<usize>,
    scratch: &mut Scratch,
) {
    let p = &problem.attention;
    let (dim, rows) = (p.head_dim, p.group() * tile.len());
    load_queries(p, &inputs.q, head, tile, &mut scratch.q);
    let Scratch {
        q,
        acc,
        p: weights,
        max,
        sum,
        masked_keys: keys,
        masked_blocks: seen,
        ..
    } = scratch;
    let q = q.read(rows * dim);
    let acc = acc.get(rows * dim);
    let (max, sum) = (max.get(rows), sum.get(rows));
    acc.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    seen.look(problem, bits, head, tile);
    let (count, step) = (seen.blocks.len(), blocks_at_once(problem));
    for start in (0..count).step_by(step) {
        keys.gather(
            problem,
            inputs,
            head,
            tile,
            seen,
            start..count.min(start + step),
        );
        let columns = keys.columns;
        let weights = weights.get(rows * columns);
        let spoilt = zero_spoilt_values(keys, dim);
        product(
            [rows, columns, dim],
            weights,
            false,
            p.scale,
            Matrix::rows(q, dim),
            Matrix::rows(keys.k.read(columns * dim), dim).transposed(),
        );
        run(SoftmaxBlock {
            p: weights,
            keys,
            seen,
            softcap: p.softcap,
            max,
            sum,
            acc,
        });
        product(
            [rows, dim, columns],
            acc,
            true,
            1.0,
            Matrix::rows(weights, columns),
            Matrix::rows(keys.v.read(columns * dim), dim),
        );
        add_spoilt(&spoilt, keys, seen, weights, acc);
    }
}

/// Takes the value rows with NaN or infinity out of keys that some row does not see: in the matrix product
/// they would reach that row, as `0 * NaN`. They are added on their own.
fn zero_spoilt_values(keys: &mut MaskedKeys, dim: usize) -> Vec<(usize, Vec<f32>)> {
    let mut spoilt = Vec::new();
    if keys.full {
        return spoilt;
    }
    let v = keys.v.get(keys.len * dim);
    for (column, row) in v.chunks_exact_mut(dim).enumerate() {
        if !is_finite(row) {
            spoilt.push((column, row.to_vec()));
            row.fill(0.0);
        }
    }
    spoilt
}

fn add_spoilt(
    spoilt: &[(usize, Vec<f32>)],
    keys: &MaskedKeys,
    seen: &TileBlocks,
    weights: &[f32],
    acc: &mut [f32],
) {
    for (column, value) in spoilt {
        for (r, acc) in acc.chunks_exact_mut(value.len()).enumerate() {
            if seen.sees(keys.first, r, *column) {
                let p = weights[r * keys.columns + column];
                for (acc, v) in acc.iter_mut().zip(value) {
                    *acc += p * v;
                }
            }
        }
    }
}

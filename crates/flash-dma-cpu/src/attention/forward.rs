//! The forward pass: online softmax over gathered blocks of keys.

use crate::attention::schedule::{forward_chunks, key_block, query_tile, split_rows};
use crate::attention::softmax::SoftmaxBlock;
use crate::gemm::{Matrix, product};
use crate::keys::intervals::RangeKeys;
use crate::keys::source::KeySource;
use crate::scratch::{Buffer, KeyBlock, Scratch, is_finite, with_scratch};
use crate::simd::run;
use crate::{Element, Problem, View};
use rayon::prelude::*;
use std::ops::Range;

/// The whole pass, on checked arguments. One task is a chunk of the queries of one key/value head,
/// with all query heads of its group; it owns their rows of `out` and `lse`.
pub(crate) fn forward<E: Element>(
    problem: &Problem,
    q: &View<'_, E, 4>,
    keys: &impl KeySource<E>,
    out: &mut [E],
    lse: &mut [f32],
) {
    let bounds = forward_chunks(problem);
    let chunks = bounds.len() - 1;
    split_rows(out, problem, &bounds, problem.head_dim)
        .into_par_iter()
        .zip(split_rows(lse, problem, &bounds, 1))
        .enumerate()
        .with_max_len(1)
        .for_each(|(task, (mut out, mut lse))| {
            let (head, chunk) = (task / chunks, task % chunks);
            let head = [head / problem.kv_heads, head % problem.kv_heads];
            let queries = bounds[chunk]..bounds[chunk + 1];
            with_scratch(|scratch| {
                attend_chunk(problem, q, keys, head, queries, &mut out, &mut lse, scratch);
            });
        });
}

/// The keys that the queries `queries` of a key/value head attend to.
pub(crate) fn keys_of<E: Element>(
    problem: &Problem,
    source: &impl KeySource<E>,
    head: [usize; 2],
    queries: &Range<usize>,
) -> RangeKeys {
    let (first, last) = (
        problem.position(queries.start),
        problem.position(queries.end - 1),
    );
    RangeKeys::new(source.intervals(head), problem.k_len, first, last)
}

fn attend_chunk<E: Element>(
    problem: &Problem,
    q: &View<'_, E, 4>,
    source: &impl KeySource<E>,
    head: [usize; 2],
    queries: Range<usize>,
    out: &mut [&mut [E]],
    lse: &mut [&mut [f32]],
    scratch: &mut Scratch,
) {
    let keys = keys_of(problem, source, head, &queries);
    scratch.tile.restart();
    for first in queries.clone().step_by(query_tile(problem)) {
        let tile = first..queries.end.min(first + query_tile(problem));
        attend_tile(problem, q, source, head, &keys, tile.clone(), scratch);
        finish_tile(
            problem,
            tile.start - queries.start..tile.end - queries.start,
            out,
            lse,
            scratch,
        );
    }
}

/// Leaves the unnormalised outputs of the queries `tile` in `scratch.acc`, row `h * tile.len() + i`
/// being query `i` of head `h` of the group, and their maxima and sums beside them.
fn attend_tile<E: Element>(
    problem: &Problem,
    q: &View<'_, E, 4>,
    source: &impl KeySource<E>,
    head: [usize; 2],
    keys: &RangeKeys,
    tile: Range<usize>,
    scratch: &mut Scratch,
) {
    let (dim, queries) = (problem.head_dim, tile.len());
    let rows = problem.group() * queries;
    load_queries(problem, q, head, &tile, &mut scratch.q);
    let Scratch {
        q,
        acc,
        p,
        max,
        sum,
        block,
        tile: tile_keys,
        ..
    } = scratch;
    let q = q.read(rows * dim);
    let acc = acc.get(rows * dim);
    let (max, sum) = (max.get(rows), sum.get(rows));
    acc.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    let (first, last) = (problem.position(tile.start), problem.position(tile.end - 1));
    tile_keys.advance(keys, first, last);
    let count = tile_keys.slots.len();
    for start in (0..count).step_by(key_block(problem)) {
        let places = start..count.min(start + key_block(problem));
        block.gather(problem, source, head, keys, tile_keys, places);
        let columns = block.columns;
        let p = p.get(rows * columns);
        let spoilt = zero_spoilt_values(block, dim);
        product(
            [rows, columns, dim],
            p,
            false,
            problem.scale,
            Matrix::rows(q, dim),
            Matrix::rows(block.k.read(columns * dim), dim).transposed(),
        );
        run(SoftmaxBlock {
            p,
            block,
            queries,
            softcap: problem.softcap,
            max,
            sum,
            acc,
        });
        product(
            [rows, dim, columns],
            acc,
            true,
            1.0,
            Matrix::rows(p, columns),
            Matrix::rows(block.v.read(columns * dim), dim),
        );
        for (column, value) in spoilt {
            for r in (0..rows).filter(|r| block.attends(r % queries, column)) {
                let p = p[r * columns + column];
                for (acc, v) in acc[r * dim..(r + 1) * dim].iter_mut().zip(&value) {
                    *acc += p * v;
                }
            }
        }
    }
}

/// Rows of `source` for the queries `tile` of each head of the group, widened to f32.
pub(crate) fn load_queries<E: Element>(
    problem: &Problem,
    source: &View<'_, E, 4>,
    [batch, head]: [usize; 2],
    tile: &Range<usize>,
    target: &mut Buffer,
) {
    let (dim, group) = (problem.head_dim, problem.group());
    let target = target.get(group * tile.len() * dim);
    let mut rows = target.chunks_exact_mut(dim);
    for h in head * group..(head + 1) * group {
        for (i, row) in tile.clone().zip(&mut rows) {
            E::widen(source.row(batch, h, i), row);
        }
    }
}

/// Takes the value rows with NaN or infinity out of the boundary columns: in the matrix product they
/// would reach queries that do not attend to them, as `0 * NaN`. They are added on their own.
fn zero_spoilt_values(block: &mut KeyBlock, dim: usize) -> Vec<(usize, Vec<f32>)> {
    let boundary = block.boundary();
    let v = block.v.get(block.columns * dim);
    let mut spoilt = Vec::new();
    for column in boundary {
        let row = &mut v[column * dim..(column + 1) * dim];
        if !is_finite(row) {
            spoilt.push((column, row.to_vec()));
            row.fill(0.0);
        }
    }
    spoilt
}

/// Normalises and writes the rows of one tile: `tile` counts from the start of the chunk.
pub(crate) fn finish_tile<E: Element>(
    problem: &Problem,
    tile: Range<usize>,
    out: &mut [&mut [E]],
    lse: &mut [&mut [f32]],
    scratch: &mut Scratch,
) {
    let dim = problem.head_dim;
    let rows = problem.group() * tile.len();
    let acc = scratch.acc.get(rows * dim);
    let (max, sum) = (scratch.max.read(rows), scratch.sum.read(rows));
    for (r, acc) in acc.chunks_exact_mut(dim).enumerate() {
        let (h, i) = (r / tile.len(), tile.start + r % tile.len());
        // A sum of exactly 0: nothing selected, or every selected logit is -inf.
        if sum[r] == 0.0 {
            acc.fill(0.0);
            lse[h][i] = f32::NEG_INFINITY;
        } else {
            for x in acc.iter_mut() {
                *x /= sum[r];
            }
            lse[h][i] = max[r] + sum[r].ln();
        }
        E::round(acc, &mut out[h][i * dim..(i + 1) * dim]);
    }
}

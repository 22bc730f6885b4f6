//! The gradients of K and V: sums over each chunk of queries, and the sums of those.

use crate::element::Element;
use crate::simd::add_scaled;
use flash_dma_problem::Problem;
use rayon::prelude::*;
use std::ops::Range;

/// Keys of a task of the second sum.
const REDUCED_KEYS: usize = 256;

/// Gradients of the keys that one chunk of queries touches, a row for each entry of its list.
pub(crate) struct KeyGradients {
    /// The index of each entry's key, ascending.
    pub(crate) index: Vec<u32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
}

impl KeyGradients {
    fn entries(&self, keys: &Range<usize>) -> Range<usize> {
        let entry = |key: usize| self.index.partition_point(|&index| (index as usize) < key);
        entry(keys.start)..entry(keys.end)
    }
}

/// Adds the chunks of each key/value head in order and writes the gradients of K and V; a key that
/// no chunk touched gets zeros. `partials` holds `chunks` per head.
pub(crate) fn reduce<E: Element>(
    problem: &Problem,
    partials: &[KeyGradients],
    chunks: usize,
    [dk, dv]: [&mut [E]; 2],
) {
    let (k_len, dim) = (problem.k_len, problem.head_dim);
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
        let mut reduce = |target: &mut [E], rows: fn(&KeyGradients) -> &[f32]| {
            sum.fill(0.0);
            for partial in partials {
                let entries = partial.entries(&keys);
                let rows = rows(partial)[entries.start * dim..entries.end * dim].chunks_exact(dim);
                for (&key, row) in partial.index[entries].iter().zip(rows) {
                    add_scaled(&mut sum[(key as usize - first) * dim..][..dim], 1.0, row);
                }
            }
            E::round(&sum, target);
        };
        reduce(dk, |partial| &partial.dk);
        reduce(dv, |partial| &partial.dv);
    });
}

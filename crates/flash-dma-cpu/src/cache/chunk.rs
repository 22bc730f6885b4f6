//! The keys that a chunk of a prompt attends to: those of the slots and its own.

use super::placement::EMPTY;
use super::tensors::{ChunkKeys, SlotsRef, Tokens};
use crate::element::Element;
use flash_dma_problem::AppendProblem;
use rayon::prelude::*;

/// Writes the slots in order of position and the tokens after them, see [`chunk_keys`](super::chunk_keys).
pub(crate) fn gather<E: Element>(
    problem: &AppendProblem,
    slots: &SlotsRef<'_, E>,
    tokens: &Tokens<'_, E>,
    target: ChunkKeys<'_, E>,
) {
    let ChunkKeys { k, v, scores, rank } = target;
    let (window, heads) = (problem.cache.capacity(), problem.cache.kv_heads);
    let (dim, len) = (problem.cache.head_dim, window + problem.tokens);
    let zero = vec![0.0; dim];
    (k.par_chunks_exact_mut(len * dim))
        .zip(v.par_chunks_exact_mut(len * dim))
        .zip(scores.par_chunks_exact_mut(len))
        .enumerate()
        .for_each(|(row, ((k, v), scores))| {
            let [batch, head] = [row / heads, row % heads];
            let base = row * window;
            let mut order: Vec<usize> = (base..base + window).collect();
            // Empty slots are at position -1.
            order.sort_by_key(|&slot| slots.position[slot]);
            for (at, slot) in order.into_iter().enumerate() {
                let (to, from) = (at * dim..(at + 1) * dim, slot * dim..(slot + 1) * dim);
                if slots.position[slot] == EMPTY {
                    E::round(&zero, &mut k[to.clone()]);
                    E::round(&zero, &mut v[to]);
                    scores[at] = f32::NEG_INFINITY;
                } else {
                    k[to.clone()].copy_from_slice(&slots.k[from.clone()]);
                    v[to].copy_from_slice(&slots.v[from]);
                    scores[at] = slots.score[slot];
                }
            }
            for token in 0..problem.tokens {
                let to = (window + token) * dim..(window + token + 1) * dim;
                k[to.clone()].copy_from_slice(tokens.k.row(batch, head, token));
                v[to].copy_from_slice(tokens.v.row(batch, head, token));
            }
            if let Some(new) = &tokens.scores {
                scores[window..].copy_from_slice(new.row(batch, head));
            }
        });
    if let Some(rank) = rank {
        rank_sinks(problem, slots, scores, rank);
    }
}

/// Writes the scores, with +∞ for visible sinks.
fn rank_sinks<E>(
    problem: &AppendProblem,
    slots: &SlotsRef<'_, E>,
    scores: &[f32],
    rank: &mut [f32],
) {
    let (window, heads) = (problem.cache.capacity(), problem.cache.kv_heads);
    let rule = problem.cache.rule().expect("checked: the cache has slots");
    let len = window + problem.tokens;
    rank.copy_from_slice(scores);
    for (row, (rank, held)) in (rank.chunks_exact_mut(len))
        .zip(slots.position.chunks_exact(window))
        .enumerate()
    {
        let mut positions = held.to_vec();
        positions.sort_unstable();
        let first = slots.seen[row / heads];
        positions.extend((0..problem.tokens).map(|token| first + token as i32));
        for (rank, position) in rank.iter_mut().zip(positions) {
            let is_sink = (0..rule.sinks as i32).contains(&position);
            if is_sink && *rank != f32::NEG_INFINITY {
                *rank = f32::INFINITY;
            }
        }
    }
}

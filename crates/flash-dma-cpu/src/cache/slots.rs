//! Slots: appending to them, and attention over them and the new tokens.

use super::check::forward_problem;
use super::placement::{HeldKeys, changes, place};
use super::tensors::{Slots, SlotsRef, Tokens};
use crate::args::Outputs;
use crate::attention::forward::forward;
use crate::element::Element;
use crate::keys::bias::Bias;
use crate::keys::operands::{KeyRows, KeySource, Operands};
use crate::queries::KvHead;
use crate::view::View;
use flash_dma_problem::{AppendProblem, AttentionError, CacheShape, DecodeProblem, Interval};
use rayon::prelude::*;

/// The outcome of an append for every head.
pub(crate) struct Placements {
    /// `[batch, kv_heads, window]`, see [`place`].
    placed: Vec<u32>,
    /// `[batch, kv_heads, window + tokens]`, see [`place`].
    intervals: Vec<Interval>,
}

impl Placements {
    pub(crate) fn new<E: Element>(
        problem: &AppendProblem,
        slots: &SlotsRef<'_, E>,
        tokens: &Tokens<'_, E>,
    ) -> Self {
        let (cache, window) = (problem.cache, problem.cache.capacity());
        let heads = cache.batch * cache.kv_heads;
        let len = window + problem.tokens;
        let mut placements = Self {
            placed: vec![0; heads * window],
            intervals: vec![Interval { first: 0, end: 0 }; heads * len],
        };
        let scores = tokens.scores.expect("checked: slots have scores");
        let rule = cache.rule().expect("checked: the cache has slots");
        (placements.placed.par_chunks_exact_mut(window))
            .zip(placements.intervals.par_chunks_exact_mut(len))
            .enumerate()
            .for_each(|(row, (placed, intervals))| {
                let of_row = row * window..(row + 1) * window;
                let [batch, head] = [row / cache.kv_heads, row % cache.kv_heads];
                let held = HeldKeys {
                    scores: &slots.score[of_row.clone()],
                    positions: &slots.position[of_row],
                };
                let (tokens, first) = (scores.row(batch, head), slots.seen[batch] as usize);
                place(rule, held, tokens, first, placed, intervals);
            });
        placements
    }

    pub(crate) fn commit<E: Element>(
        &self,
        problem: &AppendProblem,
        slots: &mut Slots<'_, E>,
        tokens: &Tokens<'_, E>,
    ) {
        let (cache, window) = (problem.cache, problem.cache.capacity());
        let dim = cache.head_dim;
        let scores = tokens.scores.expect("checked: slots have scores");
        let seen = &slots.seen;
        (slots.k.par_chunks_exact_mut(window * dim))
            .zip(slots.v.par_chunks_exact_mut(window * dim))
            .zip(slots.score.par_chunks_exact_mut(window))
            .zip(slots.position.par_chunks_exact_mut(window))
            .zip(self.placed.par_chunks_exact(window))
            .enumerate()
            .for_each(|(row, ((((k, v), score), position), placed))| {
                let [batch, head] = [row / cache.kv_heads, row % cache.kv_heads];
                for (slot, token) in changes(placed) {
                    let at = slot * dim..(slot + 1) * dim;
                    k[at.clone()].copy_from_slice(tokens.k.row(batch, head, token));
                    v[at].copy_from_slice(tokens.v.row(batch, head, token));
                    score[slot] = scores.row(batch, head)[token];
                    position[slot] = seen[batch] + token as i32;
                }
            });
        for seen in slots.seen.iter_mut() {
            *seen += problem.tokens as i32;
        }
    }
}

/// The keys that the slots held before an append, slot by slot, followed by the new tokens.
struct SlotRows<'a, E> {
    shape: CacheShape,
    k: &'a [E],
    v: &'a [E],
    tokens: Tokens<'a, E>,
}

impl<E: Element> KeyRows<E> for SlotRows<'_, E> {
    #[inline]
    fn rows(&self, KvHead { batch, head }: KvHead, key: usize) -> [&[E]; 2] {
        let (window, dim) = (self.shape.capacity(), self.shape.head_dim);
        if let Some(token) = key.checked_sub(window) {
            return self.tokens.rows(batch, head, token);
        }
        let slot = (batch * self.shape.kv_heads + head) * window + key;
        [self.k, self.v].map(|rows| &rows[slot * dim..(slot + 1) * dim])
    }
}

/// Attention of the tokens over the slots and each other, by the intervals of their placements, which it returns.
pub(crate) fn attend<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    slots: &SlotsRef<'_, E>,
    tokens: &Tokens<'_, E>,
    outputs: Outputs<'_, E>,
) -> Result<Placements, AttentionError> {
    let placements = Placements::new(&problem.append, slots, tokens);
    let intervals = &placements.intervals;
    let shape = problem.append.cache;
    let window = shape.capacity();
    let len = window + problem.append.tokens;
    let new = tokens.scores.expect("checked: slots have scores");
    let mut scores = Vec::with_capacity(intervals.len());
    for (row, held) in slots.score.chunks_exact(window).enumerate() {
        scores.extend_from_slice(held);
        scores.extend_from_slice(new.row(row / shape.kv_heads, row % shape.kv_heads));
    }
    let problem = forward_problem(problem, problem.q_shape(), len, Some(window))?;
    let scores = View::contiguous(&scores, problem.scores_shape());
    // Keys of score −∞ are in no interval.
    let bias = (shape.adds_scores()).then(|| Bias::of_scores(&scores, problem.group()));
    let operands = Operands {
        problem: &problem,
        q: *q,
        rows: SlotRows {
            shape,
            k: slots.k,
            v: slots.v,
            tokens: *tokens,
        },
        source: KeySource::Intervals(intervals),
        bias,
    };
    forward(&operands, outputs);
    Ok(placements)
}

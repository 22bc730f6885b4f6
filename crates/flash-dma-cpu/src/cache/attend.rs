//! Attention over a cache: the forward pass on keys where they lie.

use super::pages::place;
use super::placement::EMPTY;
use super::{Pages, SlotsRef, Tokens};
use crate::attention::forward;
use crate::keys::source::KeySource;
use crate::{Element, View};
use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, Interval, Problem,
};
use rayon::prelude::*;

/// The old keys of the slots, slot by slot, and the new tokens behind them.
pub(crate) struct SlotKeys<'a, E> {
    pub(crate) shape: CacheShape,
    pub(crate) tokens: Tokens<'a, E>,
    pub(crate) k: &'a [E],
    pub(crate) v: &'a [E],
    pub(crate) scores: &'a [f32],
    /// `[batch, kv_heads, window + tokens]`.
    pub(crate) intervals: &'a [Interval],
}

impl<E> SlotKeys<'_, E> {
    /// The row of a slot, or the token.
    #[inline]
    fn place(&self, [batch, head]: [usize; 2], key: usize) -> Result<usize, usize> {
        let window = self.shape.capacity();
        match key.checked_sub(window) {
            None => Ok((batch * self.shape.kv_heads + head) * window + key),
            Some(token) => Err(token),
        }
    }
}

impl<E: Element> KeySource<E> for SlotKeys<'_, E> {
    #[inline]
    fn key(&self, head: [usize; 2], key: usize) -> &[E] {
        let dim = self.shape.head_dim;
        match self.place(head, key) {
            Ok(row) => &self.k[row * dim..(row + 1) * dim],
            Err(token) => self.tokens.k.row(head[0], head[1], token),
        }
    }

    #[inline]
    fn value(&self, head: [usize; 2], key: usize) -> &[E] {
        let dim = self.shape.head_dim;
        match self.place(head, key) {
            Ok(row) => &self.v[row * dim..(row + 1) * dim],
            Err(token) => self.tokens.v.row(head[0], head[1], token),
        }
    }

    #[inline]
    fn score(&self, head: [usize; 2], key: usize) -> f32 {
        match self.place(head, key) {
            Ok(row) => self.scores[row],
            Err(token) => (self.tokens.scores).map_or(0.0, |z| z.row(head[0], head[1])[token]),
        }
    }

    fn intervals(&self, [batch, head]: [usize; 2]) -> Option<&[Interval]> {
        let [_, heads, tokens, _] = self.tokens.k.shape;
        let len = self.shape.capacity() + tokens;
        let row = (batch * heads + head) * len;
        Some(&self.intervals[row..row + len])
    }
}

/// Attention of the tokens over the slots and each other.
pub(crate) fn slots<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    keys: &SlotKeys<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    let window = problem.append.cache.capacity();
    let len = window + problem.append.tokens;
    let problem = as_forward(problem, problem.q_shape(), len, Some(window))?;
    forward::forward(&problem, q, keys, out, lse);
    Ok(())
}

/// Writes the slots in order of position and the tokens behind them, see [`chunk_keys`](super::chunk_keys).
pub(crate) fn gather<E: Element>(
    problem: &AppendProblem,
    slots: &SlotsRef<'_, E>,
    tokens: &Tokens<'_, E>,
    k: &mut [E],
    v: &mut [E],
    scores: &mut [f32],
) {
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
}

/// The keys of the sequences in their pages, or of one of them.
pub(crate) struct PageKeys<'a, E> {
    shape: CacheShape,
    k: &'a [E],
    v: &'a [E],
    scores: Option<&'a [f32]>,
    table: &'a [i32],
    lengths: &'a [i32],
}

impl<'a, E> PageKeys<'a, E> {
    pub(crate) fn new(shape: CacheShape, pages: &'a Pages<'_, E>) -> Self {
        Self {
            shape,
            k: pages.k,
            v: pages.v,
            scores: pages.scores.as_deref(),
            table: pages.table,
            lengths: pages.lengths,
        }
    }
}

/// The keys of one sequence, which is number 0 of its problem.
struct SequenceKeys<'a, E> {
    keys: &'a PageKeys<'a, E>,
    batch: usize,
    /// `[kv_heads, length]`, given exactly if there are scores.
    intervals: Option<Vec<Interval>>,
}

impl<'a, E: Element> SequenceKeys<'a, E> {
    /// A score of −∞ hides its key; every other key stays.
    fn new(keys: &'a PageKeys<'a, E>, batch: usize) -> Self {
        let mut source = Self {
            keys,
            batch,
            intervals: None,
        };
        let len = keys.lengths[batch] as usize;
        if keys.scores.is_some() {
            let heads = 0..keys.shape.kv_heads;
            let interval = |head: usize, key: usize| {
                let hidden = source.score([0, head], key) == f32::NEG_INFINITY;
                Interval {
                    first: key as u32,
                    end: if hidden { key } else { len } as u32,
                }
            };
            let intervals = heads.flat_map(|head| (0..len).map(move |key| (head, key)));
            source.intervals = Some(intervals.map(|(h, j)| interval(h, j)).collect());
        }
        source
    }

    #[inline]
    fn row(&self, head: usize, key: usize) -> usize {
        let shape = &self.keys.shape;
        let [_, heads, page_len, _] = shape.kv_shape();
        let [page, offset] = place(shape, self.keys.table, self.batch, key);
        (page * heads + head) * page_len + offset
    }
}

impl<E: Element> KeySource<E> for SequenceKeys<'_, E> {
    #[inline]
    fn key(&self, [_, head]: [usize; 2], key: usize) -> &[E] {
        let (row, dim) = (self.row(head, key), self.keys.shape.head_dim);
        &self.keys.k[row * dim..(row + 1) * dim]
    }

    #[inline]
    fn value(&self, [_, head]: [usize; 2], key: usize) -> &[E] {
        let (row, dim) = (self.row(head, key), self.keys.shape.head_dim);
        &self.keys.v[row * dim..(row + 1) * dim]
    }

    #[inline]
    fn score(&self, [_, head]: [usize; 2], key: usize) -> f32 {
        (self.keys.scores).map_or(0.0, |scores| scores[self.row(head, key)])
    }

    fn intervals(&self, [_, head]: [usize; 2]) -> Option<&[Interval]> {
        let len = self.keys.lengths[self.batch] as usize;
        Some(&self.intervals.as_ref()?[head * len..(head + 1) * len])
    }
}

/// Attention of the tokens, which the pages hold already, sequence by sequence: their lengths differ.
pub(crate) fn pages<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    keys: &PageKeys<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    let [_, heads, tokens, dim] = problem.q_shape();
    let rows = heads * tokens;
    if rows == 0 {
        return Ok(());
    }
    (out.par_chunks_exact_mut(rows * dim))
        .zip(lse.par_chunks_exact_mut(rows))
        .enumerate()
        .try_for_each(|(batch, (out, lse))| {
            let source = SequenceKeys::new(keys, batch);
            let len = keys.lengths[batch] as usize;
            let window = keys.scores.map(|_| len.max(1));
            let one = as_forward(problem, [1, heads, tokens, dim], len, window)?;
            let q = View {
                data: &q.data[batch * q.strides[0]..],
                shape: one.q_shape(),
                strides: q.strides,
            };
            forward::forward(&one, &q, &source, out, lse);
            Ok(())
        })
}

/// The problem of a forward pass with `len` keys, whose last are the tokens.
fn as_forward(
    problem: &DecodeProblem,
    q: [usize; 4],
    len: usize,
    window: Option<usize>,
) -> Result<Problem, AttentionError> {
    let cache = problem.append.cache;
    let kv = [q[0], cache.kv_heads, len, cache.head_dim];
    let options = AttentionOptions {
        keep_window: window,
        scale: Some(problem.scale),
        softcap: problem.softcap,
        ..AttentionOptions::new()
    };
    let scores = window.map(|_| &kv[..3]);
    Problem::new(&q, &kv, &kv, scores, cache.element, &options)
}

//! Decoding: appending tokens to a cache, and attention of new tokens over it.

mod attend;
mod check;
mod pages;
mod placement;
#[cfg(test)]
mod tests;

use crate::check::buffer;
use crate::{Element, View};
use attend::{PageKeys, SlotKeys};
use flash_dma_problem::{
    AppendProblem, AttentionError, DecodeProblem, Interval, Storage, TensorName,
};
use placement::Plan;
use rayon::prelude::*;

/// The tensors of a cache: contiguous, in the shapes of its [`Storage`].
#[derive(Debug)]
pub enum Cache<'a, E> {
    /// The best keys of each head.
    Slots(Slots<'a, E>),
    /// Every key.
    Pages(Pages<'a, E>),
}

/// The tensors of [`Storage::Slots`].
#[derive(Debug)]
pub struct Slots<'a, E> {
    /// `[batch, kv_heads, window, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, window, head_dim]`.
    pub v: &'a mut [E],
    /// `[batch, kv_heads, window]`; −∞ in an empty slot.
    pub score: &'a mut [f32],
    /// `[batch, kv_heads, window]`: where in its sequence the key is; −1 in an empty slot.
    pub position: &'a mut [i32],
    /// `[batch]`: the tokens each sequence has been given.
    pub seen: &'a mut [i32],
}

/// What of [`Slots`] is read to attend over them.
#[derive(Clone, Copy, Debug)]
pub struct SlotsRef<'a, E> {
    /// As in [`Slots`].
    pub k: &'a [E],
    /// As in [`Slots`].
    pub v: &'a [E],
    /// As in [`Slots`].
    pub score: &'a [f32],
    /// As in [`Slots`].
    pub position: &'a [i32],
}

/// The tensors of [`Storage::Pages`].
#[derive(Debug)]
pub struct Pages<'a, E> {
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub k: &'a mut [E],
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub v: &'a mut [E],
    /// `[pages, kv_heads, page_len]`, given exactly if the cache has scores; −∞ hides a key.
    pub scores: Option<&'a mut [f32]>,
    /// `[batch, max_pages]`: the pages of each sequence in order.
    pub table: &'a [i32],
    /// `[batch]`: the tokens each sequence holds.
    pub lengths: &'a mut [i32],
}

/// New tokens of every sequence.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a, E> {
    /// `[batch, kv_heads, tokens, head_dim]`.
    pub k: View<'a, E, 4>,
    /// `[batch, kv_heads, tokens, head_dim]`.
    pub v: View<'a, E, 4>,
    /// `[batch, kv_heads, tokens]`, given exactly if the cache has scores: slots have.
    pub scores: Option<View<'a, f32, 3>>,
}

/// Appends tokens to a cache, in place.
///
/// Slots then hold the `window` best keys of everything their sequence has been given, by the order of
/// [`select`](crate::select()): one token costs O(window) a head, many O(window + tokens · log window).
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape, or the page table names a
/// page that does not exist. Nothing is written then.
pub fn append<E: Element>(
    problem: &AppendProblem,
    cache: Cache<'_, E>,
    tokens: Tokens<'_, E>,
) -> Result<(), AttentionError> {
    check::append(problem, &cache, &tokens)?;
    match cache {
        Cache::Slots(mut slots) => {
            let plans = Plans::new(problem, &slots, &tokens);
            plans.commit(problem, &mut slots, &tokens);
        }
        Cache::Pages(mut pages) => pages::append(problem, &mut pages, &tokens),
    }
    Ok(())
}

/// A decode step: attention of new tokens over the cache and over each other, and their append. Query
/// `t` sees what it would if the tokens came one at a time.
///
/// Writes `out`, contiguous `[batch, q_heads, tokens, head_dim]`, and `lse`, contiguous `[batch, q_heads,
/// tokens]`, as [`forward`](crate::forward()) does. Any number of tokens is served.
///
/// # Errors
///
/// As [`append`].
pub fn decode<E: Element>(
    problem: &DecodeProblem,
    q: View<'_, E, 4>,
    cache: Cache<'_, E>,
    tokens: Tokens<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    let append = &problem.append;
    check::append(append, &cache, &tokens)?;
    check::decode(problem, &q, out, lse)?;
    match cache {
        Cache::Slots(mut slots) => {
            let plans = Plans::new(append, &slots, &tokens);
            let keys = SlotKeys {
                shape: append.cache,
                tokens,
                k: slots.k,
                v: slots.v,
                scores: slots.score,
                intervals: &plans.intervals,
            };
            attend::slots(problem, &q, &keys, out, lse)?;
            plans.commit(append, &mut slots, &tokens);
        }
        Cache::Pages(mut pages) => {
            pages::append(append, &mut pages, &tokens);
            let keys = PageKeys::new(append.cache, &pages);
            attend::pages(problem, &q, &keys, out, lse)?;
        }
    }
    Ok(())
}

/// What a prefill attends over: writes `k` and `v` `[batch, kv_heads, window + tokens, head_dim]` and `scores`
/// `[batch, kv_heads, window + tokens]`, all contiguous: the slots in order of position, the empty ones first
/// with zeros and a score of −∞, and the tokens behind them.
///
/// [`select`](crate::select()) and a causal [`forward`](crate::forward()) of the tokens' queries over these
/// keys equal one pass over everything the sequences have been given.
///
/// # Errors
///
/// As [`append`].
pub fn chunk_keys<E: Element>(
    problem: &AppendProblem,
    slots: SlotsRef<'_, E>,
    tokens: Tokens<'_, E>,
    k: &mut [E],
    v: &mut [E],
    scores: &mut [f32],
) -> Result<(), AttentionError> {
    check::slots(&problem.cache, &slots)?;
    check::tokens(problem, &tokens)?;
    let len = window(problem) + problem.tokens;
    let [batch, heads, _, dim] = problem.kv_shape();
    buffer(TensorName::Key, k, &[batch, heads, len, dim])?;
    buffer(TensorName::Value, v, &[batch, heads, len, dim])?;
    buffer(TensorName::Scores, scores, &[batch, heads, len])?;
    attend::gather(problem, &slots, &tokens, k, v, scores);
    Ok(())
}

/// What an append does to every head.
struct Plans {
    /// `[batch, kv_heads, window]`, see [`Plan`].
    token: Vec<u32>,
    /// `[batch, kv_heads, window + tokens]`, see [`Plan`].
    intervals: Vec<Interval>,
}

impl Plans {
    fn new<E: Element>(
        problem: &AppendProblem,
        slots: &Slots<'_, E>,
        tokens: &Tokens<'_, E>,
    ) -> Self {
        let (cache, window) = (problem.cache, window(problem));
        let heads = cache.batch * cache.kv_heads;
        let len = window + problem.tokens;
        let mut plans = Self {
            token: vec![0; heads * window],
            intervals: vec![Interval { first: 0, end: 0 }; heads * len],
        };
        let scores = tokens.scores.expect("checked: slots have scores");
        (plans.token.par_chunks_exact_mut(window))
            .zip(plans.intervals.par_chunks_exact_mut(len))
            .enumerate()
            .for_each(|(row, (token, intervals))| {
                let of_row = row * window..(row + 1) * window;
                let [batch, head] = [row / cache.kv_heads, row % cache.kv_heads];
                Plan { token, intervals }.make(
                    &slots.score[of_row.clone()],
                    &slots.position[of_row],
                    scores.row(batch, head),
                    slots.seen[batch] as usize,
                );
            });
        plans
    }

    /// Writes the tokens into the slots they get.
    fn commit<E: Element>(
        &self,
        problem: &AppendProblem,
        slots: &mut Slots<'_, E>,
        tokens: &Tokens<'_, E>,
    ) {
        let (cache, window) = (problem.cache, window(problem));
        let dim = cache.head_dim;
        let scores = tokens.scores.expect("checked: slots have scores");
        let seen = &slots.seen;
        (slots.k.par_chunks_exact_mut(window * dim))
            .zip(slots.v.par_chunks_exact_mut(window * dim))
            .zip(slots.score.par_chunks_exact_mut(window))
            .zip(slots.position.par_chunks_exact_mut(window))
            .zip(self.token.par_chunks_exact(window))
            .enumerate()
            .for_each(|(row, ((((k, v), score), position), token))| {
                let [batch, head] = [row / cache.kv_heads, row % cache.kv_heads];
                for (slot, token) in placement::changes(token) {
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

/// Slots of a head, by problems that were checked against slots.
fn window(problem: &AppendProblem) -> usize {
    match problem.cache.storage {
        Storage::Slots { window } => window,
        _ => unreachable!("checked: the cache has slots"),
    }
}

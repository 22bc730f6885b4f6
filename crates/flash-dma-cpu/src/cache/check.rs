//! The checks of a decode call, before anything is computed or written.

use super::tensors::{CacheRef, ChunkKeys, PagesRef, SlotsRef, Tokens};
use crate::check::{Checked, buffer, given, view};
use crate::element::Element;
use crate::view::View;
use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, Problem, Storage,
    TensorName,
};

pub(crate) fn append<E: Element>(
    problem: &AppendProblem,
    cache: &CacheRef<'_, E>,
    new: &Tokens<'_, E>,
) -> Checked {
    let shape = &problem.cache;
    match cache {
        CacheRef::Slots(all) => slots(shape, all)?,
        CacheRef::Pages(all) => pages(problem, all)?,
    }
    tokens(problem, new)
}

pub(crate) fn slots<E: Element>(shape: &CacheShape, slots: &SlotsRef<'_, E>) -> Checked {
    if !matches!(shape.storage, Storage::Slots { .. }) {
        return Err(unsupported("slots where the problem has pages"));
    }
    let (kv, rows) = (shape.kv_shape(), &shape.kv_shape()[..3]);
    buffer(TensorName::CachedKey, slots.k, &kv)?;
    buffer(TensorName::CachedValue, slots.v, &kv)?;
    buffer(TensorName::CachedScores, slots.score, rows)?;
    buffer(TensorName::CachedPositions, slots.position, rows)?;
    buffer(TensorName::Seen, slots.seen, &[shape.batch])
}

pub(crate) fn chunk<E: Element>(problem: &AppendProblem, keys: &ChunkKeys<'_, E>) -> Checked {
    let len = problem.cache.capacity() + problem.tokens;
    let [batch, heads, _, dim] = problem.kv_shape();
    buffer(TensorName::Key, keys.k, &[batch, heads, len, dim])?;
    buffer(TensorName::Value, keys.v, &[batch, heads, len, dim])?;
    buffer(TensorName::Scores, keys.scores, &[batch, heads, len])?;
    match (&keys.rank, problem.cache.has_sinks()) {
        (Some(rank), true) => buffer(TensorName::Rank, rank, &[batch, heads, len]),
        (None, false) => Ok(()),
        (Some(_), false) => Err(unsupported("a rank of keys without sinks")),
        (None, true) => Err(unsupported("sinks without a rank of the keys")),
    }
}

/// Checks the tensors of pages, their table, and that there is room.
fn pages<E: Element>(problem: &AppendProblem, pages: &PagesRef<'_, E>) -> Checked {
    let shape = &problem.cache;
    let Storage::Pages { max_pages, .. } = shape.storage else {
        return Err(unsupported("pages where the problem has slots"));
    };
    let (kv, rows) = (shape.kv_shape(), &shape.kv_shape()[..3]);
    buffer(TensorName::CachedKey, pages.k, &kv)?;
    buffer(TensorName::CachedValue, pages.v, &kv)?;
    let (has, error) = (shape.has_scores(), AttentionError::CacheScores);
    given(pages.scores, has, error, |scores| {
        buffer(TensorName::CachedScores, scores, rows)
    })?;
    let table_shape = [shape.batch, max_pages];
    buffer(TensorName::PageTable, pages.table, &table_shape)?;
    buffer(TensorName::Lengths, pages.lengths, &[shape.batch])?;
    table(shape, problem.tokens, pages.table, pages.lengths)
}

pub(crate) fn tokens<E: Element>(problem: &AppendProblem, tokens: &Tokens<'_, E>) -> Checked {
    let shape = &problem.cache;
    if shape.element != E::TYPE {
        let (key, expected) = (TensorName::Key, shape.element);
        return Err(AttentionError::element_type(key, expected, E::TYPE));
    }
    view(TensorName::Key, &tokens.k, &problem.kv_shape())?;
    view(TensorName::Value, &tokens.v, &problem.kv_shape())?;
    let [batch, heads, count, _] = problem.kv_shape();
    let (has, error) = (shape.has_scores(), AttentionError::CacheScores);
    given(tokens.scores, has, error, |scores| {
        view(TensorName::Scores, &scores, &[batch, heads, count])
    })
}

pub(crate) fn decode<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    out: &[E],
    lse: &[f32],
) -> Checked {
    view(TensorName::Query, q, &problem.q_shape())?;
    buffer(TensorName::Out, out, &problem.q_shape())?;
    buffer(TensorName::Lse, lse, &problem.lse_shape())
}

/// Checks that each sequence has room and that the pages it uses exist.
fn table(shape: &CacheShape, tokens: usize, table: &[i32], lengths: &[i32]) -> Checked {
    let [pages, _, page_len, _] = shape.kv_shape();
    let max_pages = shape.capacity() / page_len;
    for (batch, &held) in lengths.iter().enumerate() {
        let held = held as usize;
        if held.saturating_add(tokens) > shape.capacity() {
            return Err(AttentionError::PagesFull {
                held,
                tokens,
                capacity: shape.capacity(),
            });
        }
        let used = (held + tokens).div_ceil(page_len);
        let row = &table[batch * max_pages..][..used];
        if let Some(&page) = row.iter().find(|&&page| !(0..pages as i32).contains(&page)) {
            return Err(AttentionError::TooLarge {
                what: "a page of the page table",
                size: usize::try_from(page).unwrap_or(usize::MAX),
                limit: pages.saturating_sub(1),
            });
        }
    }
    Ok(())
}

fn unsupported(what: &str) -> AttentionError {
    AttentionError::Unsupported { what: what.into() }
}

/// Decoding as a forward pass with `len` keys, of which the last are the tokens.
pub(super) fn forward_problem(
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

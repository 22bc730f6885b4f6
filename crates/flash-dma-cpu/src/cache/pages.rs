//! Pages: appending to them, and attention over them.

use super::check::forward_problem;
use super::tensors::{Pages, PagesRef, Tokens};
use crate::args::Outputs;
use crate::attention::forward::forward;
use crate::element::Element;
use crate::keys::bias::Bias;
use crate::keys::operands::{KeyRows, KeySource, Operands};
use crate::queries::KvHead;
use crate::select::interval_of;
use crate::view::View;
use flash_dma_problem::{
    AppendProblem, AttentionError, CacheShape, DecodeProblem, Interval, Problem, Storage,
};
use rayon::prelude::*;

fn place(shape: &CacheShape, table: &[i32], batch: usize, token: usize) -> [usize; 2] {
    let Storage::Pages {
        page_len,
        max_pages,
        ..
    } = shape.storage
    else {
        unreachable!("checked: the cache has pages");
    };
    let page = table[batch * max_pages + token / page_len];
    [page as usize, token % page_len]
}

/// Writes the tokens after those that each sequence holds.
pub(crate) fn append<E: Element>(
    problem: &AppendProblem,
    pages: &mut Pages<'_, E>,
    tokens: &Tokens<'_, E>,
) {
    let shape = problem.cache;
    let [_, heads, page_len, dim] = shape.kv_shape();
    for batch in 0..shape.batch {
        let held = pages.lengths[batch] as usize;
        for token in 0..problem.tokens {
            let [page, offset] = place(&shape, pages.table, batch, held + token);
            for head in 0..heads {
                let row = (page * heads + head) * page_len + offset;
                let at = row * dim..(row + 1) * dim;
                pages.k[at.clone()].copy_from_slice(tokens.k.row(batch, head, token));
                pages.v[at].copy_from_slice(tokens.v.row(batch, head, token));
                if let (Some(scores), Some(new)) = (&mut pages.scores, &tokens.scores) {
                    scores[row] = new.row(batch, head)[token];
                }
            }
        }
        pages.lengths[batch] += problem.tokens as i32;
    }
}

/// The keys of one sequence, which is number 0 of its problem: those that its pages hold, followed by the new tokens.
struct SequenceRows<'a, E> {
    shape: CacheShape,
    pages: PagesRef<'a, E>,
    tokens: Tokens<'a, E>,
    /// Index among the cache's sequences.
    sequence: usize,
    held: usize,
}

impl<E> SequenceRows<'_, E> {
    /// The row of the pool, or the token.
    #[inline]
    fn row(&self, head: usize, key: usize) -> Result<usize, usize> {
        if let Some(token) = key.checked_sub(self.held) {
            return Err(token);
        }
        let [_, heads, page_len, _] = self.shape.kv_shape();
        let [page, offset] = place(&self.shape, self.pages.table, self.sequence, key);
        Ok((page * heads + head) * page_len + offset)
    }

    /// The scores of `len` keys of each head, if they have scores.
    fn scores(&self, len: usize) -> Option<Vec<f32>> {
        let (held, new) = (self.pages.scores?, self.tokens.scores?);
        let score = |head, key| match self.row(head, key) {
            Ok(row) => held[row],
            Err(token) => new.row(self.sequence, head)[token],
        };
        let head = |head| (0..len).map(move |key| score(head, key));
        Some((0..self.shape.kv_heads).flat_map(head).collect())
    }
}

impl<E: Element> KeyRows<E> for SequenceRows<'_, E> {
    #[inline]
    fn rows(&self, KvHead { head, .. }: KvHead, key: usize) -> [&[E]; 2] {
        let dim = self.shape.head_dim;
        match self.row(head, key) {
            Ok(row) => [self.pages.k, self.pages.v].map(|rows| &rows[row * dim..(row + 1) * dim]),
            Err(token) => self.tokens.rows(self.sequence, head, token),
        }
    }
}

/// Attention of the tokens over the pages and each other, sequence by sequence: their lengths differ.
pub(crate) fn attend<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    pages: &PagesRef<'_, E>,
    tokens: &Tokens<'_, E>,
    outputs: Outputs<'_, E>,
) -> Result<(), AttentionError> {
    let [_, heads, count, dim] = problem.q_shape();
    let rows = heads * count;
    if rows == 0 {
        return Ok(());
    }
    (outputs.out.par_chunks_exact_mut(rows * dim))
        .zip(outputs.lse.par_chunks_exact_mut(rows))
        .enumerate()
        .try_for_each(|(sequence, (out, lse))| {
            let held = pages.lengths[sequence] as usize;
            let rows = SequenceRows {
                shape: problem.append.cache,
                pages: *pages,
                tokens: *tokens,
                sequence,
                held,
            };
            let len = held + count;
            let scores = rows.scores(len);
            let last = problem.append.cache.page_window();
            let selects = scores.is_some() || last.is_some();
            let keep_window = selects.then_some(last.unwrap_or(len.max(1)));
            let problem = forward_problem(problem, [1, heads, count, dim], len, keep_window)?;
            let q = View {
                data: &q.data[sequence * q.strides[0]..],
                shape: problem.q_shape(),
                strides: q.strides,
            };
            let intervals = selects.then(|| shown(scores.as_deref(), &problem, last));
            let scores = scores.as_deref();
            let scores = scores.map(|scores| View::contiguous(scores, problem.scores_shape()));
            let operands = Operands {
                problem: &problem,
                q,
                rows,
                source: (intervals.as_deref()).map_or(KeySource::All, KeySource::Intervals),
                bias: scores.map(|scores| Bias::of_scores(&scores, problem.group())),
            };
            forward(&operands, Outputs::new(out, lse));
            Ok(())
        })
}

/// The intervals of the keys of each head: every key is attended to from its own position on, by the queries of the
/// `last` keys, unless a score of −∞ hides it.
fn shown(scores: Option<&[f32]>, problem: &Problem, last: Option<usize>) -> Vec<Interval> {
    let [_, heads, len] = problem.scores_shape();
    let last = last.unwrap_or(len);
    let interval = |at: usize| {
        let key = at % len;
        let end = match scores {
            Some(scores) if scores[at] == f32::NEG_INFINITY => key,
            _ => key.saturating_add(last).min(len),
        };
        interval_of(key, end)
    };
    (0..heads * len).map(interval).collect()
}

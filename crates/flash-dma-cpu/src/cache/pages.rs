//! Pages: appending to them, and attention over them.

use super::forward_problem::forward_problem;
use super::tensors::{Pages, Tokens};
use crate::args::Outputs;
use crate::attention::forward::forward;
use crate::attention::operands::Operands;
use crate::element::Element;
use crate::keys::bias::Bias;
use crate::keys::source::{KeyRows, KeySource, Keys};
use crate::queries::KvHead;
use crate::view::View;
use flash_dma_problem::{
    AppendProblem, AttentionError, CacheShape, DecodeProblem, Interval, Storage,
};
use rayon::prelude::*;

/// Where a token of a sequence lies.
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

/// Writes the tokens behind those that each sequence holds.
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

/// The keys of one sequence, which is number 0 of its problem.
struct SequenceRows<'a, E> {
    shape: CacheShape,
    k: &'a [E],
    v: &'a [E],
    table: &'a [i32],
    /// Which of the cache's sequences it is.
    sequence: usize,
}

impl<E> SequenceRows<'_, E> {
    #[inline]
    fn row(&self, head: usize, key: usize) -> usize {
        let [_, heads, page_len, _] = self.shape.kv_shape();
        let [page, offset] = place(&self.shape, self.table, self.sequence, key);
        (page * heads + head) * page_len + offset
    }
}

impl<E: Element> KeyRows<E> for SequenceRows<'_, E> {
    #[inline]
    fn key(&self, KvHead { head, .. }: KvHead, key: usize) -> &[E] {
        let (row, dim) = (self.row(head, key), self.shape.head_dim);
        &self.k[row * dim..(row + 1) * dim]
    }

    #[inline]
    fn value(&self, KvHead { head, .. }: KvHead, key: usize) -> &[E] {
        let (row, dim) = (self.row(head, key), self.shape.head_dim);
        &self.v[row * dim..(row + 1) * dim]
    }
}

/// Attention of the tokens, which the pages hold already, sequence by sequence: their lengths differ.
pub(crate) fn attend<E: Element>(
    problem: &DecodeProblem,
    q: &View<'_, E, 4>,
    pages: &Pages<'_, E>,
    outputs: Outputs<'_, E>,
) -> Result<(), AttentionError> {
    let [_, heads, tokens, dim] = problem.q_shape();
    let rows = heads * tokens;
    if rows == 0 {
        return Ok(());
    }
    let (k, v, table, lengths) = (&*pages.k, &*pages.v, pages.table, &*pages.lengths);
    let scores = pages.scores.as_deref();
    (outputs.out.par_chunks_exact_mut(rows * dim))
        .zip(outputs.lse.par_chunks_exact_mut(rows))
        .enumerate()
        .try_for_each(|(sequence, (out, lse))| {
            let rows = SequenceRows {
                shape: problem.append.cache,
                k,
                v,
                table,
                sequence,
            };
            let len = lengths[sequence] as usize;
            let window = scores.map(|_| len.max(1));
            let problem = forward_problem(problem, [1, heads, tokens, dim], len, window)?;
            let q = View {
                data: &q.data[sequence * q.strides[0]..],
                shape: problem.q_shape(),
                strides: q.strides,
            };
            let scores: Option<Vec<f32>> = scores.map(|scores| {
                let keys = |head| (0..len).map(move |key| (head, key));
                (0..problem.kv_heads)
                    .flat_map(keys)
                    .map(|(head, key)| scores[rows.row(head, key)])
                    .collect()
            });
            let intervals = scores.as_deref().map(|scores| shown(scores, len));
            let scores =
                (scores.as_deref()).map(|scores| View::contiguous(scores, problem.scores_shape()));
            let operands = Operands {
                problem: &problem,
                q,
                keys: Keys {
                    rows,
                    source: (intervals.as_deref()).map_or(KeySource::All, KeySource::Intervals),
                    bias: scores.map(|scores| Bias::of_scores(&scores, problem.group())),
                },
            };
            forward(&operands, Outputs::new(out, lse));
            Ok(())
        })
}

/// The intervals of `[kv_heads, len]` keys that stay: a score of −∞ hides its key, every other key is attended from
/// its own position on.
fn shown(scores: &[f32], len: usize) -> Vec<Interval> {
    let interval = |(at, &score): (usize, &f32)| {
        let key = at % len;
        let hidden = score == f32::NEG_INFINITY;
        Interval {
            first: key as u32,
            end: if hidden { key } else { len } as u32,
        }
    };
    scores.iter().enumerate().map(interval).collect()
}

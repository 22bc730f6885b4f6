//! Appending to pages.

use super::{Pages, Tokens};
use crate::Element;
use flash_dma_problem::{AppendProblem, CacheShape, Storage};

/// Where a token of a sequence lies.
pub(crate) fn place(shape: &CacheShape, table: &[i32], batch: usize, token: usize) -> [usize; 2] {
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

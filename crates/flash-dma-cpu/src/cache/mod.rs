//! Decoding: appending tokens to a cache, and attention of new tokens over it.

mod check;
mod chunk;
mod pages;
mod placement;
mod slots;
mod tensors;
#[cfg(test)]
mod tests;

pub use tensors::{Cache, CacheRef, ChunkKeys, Pages, PagesRef, Slots, SlotsRef, Tokens};

use crate::args::Outputs;
use crate::element::Element;
use crate::view::View;
use flash_dma_problem::{AppendProblem, Appending, AttentionError, DecodeProblem};
use slots::Placements;

/// Appends tokens to a cache, in place.
///
/// Slots then hold the keys, of all tokens their sequence has been given, that the cache's rule keeps at its last
/// position, by the order of [`select`](crate::select()): per head one token costs O(window), many cost O(window +
/// tokens · log window).
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape, or the page table names a page that
/// does not exist. Nothing is written then.
pub fn append<E: Element>(
    problem: &AppendProblem,
    cache: Cache<'_, E>,
    tokens: Tokens<'_, E>,
) -> Result<(), AttentionError> {
    check::append(problem, &cache.read(), &tokens)?;
    match cache {
        Cache::Slots(mut slots) => {
            let placements = Placements::new(problem, &slots.read(), &tokens);
            placements.commit(problem, &mut slots, &tokens);
        }
        Cache::Pages(mut pages) => pages::append(problem, &mut pages, &tokens),
    }
    Ok(())
}

/// A decode step: attention of new tokens over the cache and over each other, and their append, unless the problem
/// [appends later](Appending). Query `t` sees what it would if the tokens came one at a time.
///
/// Writes `out`, contiguous `[batch, q_heads, tokens, head_dim]`, and `lse`, contiguous `[batch, q_heads, tokens]`, as
/// [`forward`](crate::forward()) does. Any number of tokens is served.
///
/// # Errors
///
/// The errors of [`append`].
pub fn decode<E: Element>(
    problem: &DecodeProblem,
    q: View<'_, E, 4>,
    cache: Cache<'_, E>,
    tokens: Tokens<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    let append = &problem.append;
    check::append(append, &cache.read(), &tokens)?;
    check::decode(problem, &q, out, lse)?;
    let outputs = Outputs::new(out, lse);
    let now = problem.appending == Appending::Now;
    match cache {
        Cache::Slots(mut slots) => {
            let placements = slots::attend(problem, &q, &slots.read(), &tokens, outputs)?;
            if now {
                placements.commit(append, &mut slots, &tokens);
            }
        }
        Cache::Pages(mut pages) => {
            pages::attend(problem, &q, &pages.read(), &tokens, outputs)?;
            if now {
                pages::append(append, &mut pages, &tokens);
            }
        }
    }
    Ok(())
}

/// A decode step that appends later, over a cache that is only read; writes the outputs of [`decode`].
///
/// # Errors
///
/// The errors of [`append`]; pages must have room for the tokens here, too.
pub fn attend<E: Element>(
    problem: &DecodeProblem,
    q: View<'_, E, 4>,
    cache: CacheRef<'_, E>,
    tokens: Tokens<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    check::append(&problem.append, &cache, &tokens)?;
    check::decode(problem, &q, out, lse)?;
    let outputs = Outputs::new(out, lse);
    match cache {
        CacheRef::Slots(slots) => slots::attend(problem, &q, &slots, &tokens, outputs).map(drop),
        CacheRef::Pages(pages) => pages::attend(problem, &q, &pages, &tokens, outputs),
    }
}

/// The keys that a prefill attends to: the slots in order of position, the empty ones first with zeros and a score of
/// −∞, and then the tokens.
///
/// They form a separate sequence. Its [`select`](crate::select()) ranks by `rank` if there is one and keeps as many
/// keys as the rule keeps by rank; every interval ends later by the rule's number of recent keys, except that those of
/// hidden keys stay empty. A causal [`forward`](crate::forward()) of the tokens' queries by these intervals equals one
/// pass over everything the sequences have been given.
///
/// # Errors
///
/// The errors of [`append`]; [`AttentionError::Unsupported`] unless the rank is given exactly if the rule has sinks.
pub fn chunk_keys<E: Element>(
    problem: &AppendProblem,
    slots: SlotsRef<'_, E>,
    tokens: Tokens<'_, E>,
    keys: ChunkKeys<'_, E>,
) -> Result<(), AttentionError> {
    check::slots(&problem.cache, &slots)?;
    check::tokens(problem, &tokens)?;
    check::chunk(problem, &keys)?;
    chunk::gather(problem, &slots, &tokens, keys);
    Ok(())
}

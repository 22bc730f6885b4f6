//! Writes tokens into the slots that were chosen for them.

use crate::decode::tensors::{NewTokens, PageTensors, SlotTensors, row_at};
use cubecl::prelude::*;

/// Words of a list entry of moves: the slot, its token ([`NONE`] if the entry is not a move), and the token's position.
pub(crate) const ENTRY: usize = 3;

/// No slot, or no token.
pub(crate) const NONE: i32 = -1;

/// Writes rows, scores and positions of the tokens of `moves` into their slots, and counts all `tokens` as seen.
///
/// One unit per vector of a row of an entry; the first of each row writes score and position, too. If `replayed`, the
/// entries of a row are one token each, in order, and a slot taken twice receives the last one.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn commit_kernel<E: Numeric, N: Size>(
    tokens_in: &NewTokens<E, N>,
    cache: &mut SlotTensors<E, N>,
    entries: u32,
    #[comptime] replayed: bool,
    #[define(E)] _element: ElemType,
) {
    let vectors = cache.k.shape(3) / tokens_in.k.vector_size().comptime();
    let rows = cache.k.shape(0) * cache.k.shape(1);
    let vector = ABSOLUTE_POS % vectors;
    let at = ABSOLUTE_POS / vectors;
    let (row, entry) = (at / entries as usize, at % entries as usize);
    if row < rows {
        commit_vector::<E, N>(tokens_in, cache, entries, row, entry, vector, replayed);
    }
}

/// Vector `vector` of entry `entry` of row `row`, as in [`commit_kernel`].
#[cube]
pub(crate) fn commit_vector<E: Numeric, N: Size>(
    tokens_in: &NewTokens<E, N>,
    cache: &mut SlotTensors<E, N>,
    entries: u32,
    row: usize,
    entry: usize,
    vector: usize,
    #[comptime] replayed: bool,
) {
    let size = tokens_in.k.vector_size().comptime();
    let (heads, window) = (cache.k.shape(1), cache.k.shape(2));
    let vectors = cache.k.shape(3) / size;
    let (batch, head) = (row / heads, row % heads);
    let from = (row * entries as usize + entry) * ENTRY;
    let (slot, token) = (cache.moves[from], cache.moves[from + 1]);
    let mut moved = token != comptime!(NONE);
    if comptime!(replayed) {
        for later in entry + 1..entries as usize {
            if cache.moves[(row * entries as usize + later) * ENTRY] == slot {
                moved = false;
            }
        }
    }
    if moved {
        let (slot, token) = (slot as usize, token as usize);
        let to = (row * window + slot) * vectors + vector;
        let from_k = row_at(&tokens_in.k, batch, head, token);
        let from_v = row_at(&tokens_in.v, batch, head, token);
        cache.k[to] = tokens_in.k[from_k / size + vector];
        cache.v[to] = tokens_in.v[from_v / size + vector];
        if vector == 0 {
            let scores = tokens_in.scores.as_ref().unwrap();
            let first = batch * scores.stride(0) + head * scores.stride(1);
            cache.score[row * window + slot] = scores[first + token];
            cache.position[row * window + slot] = cache.moves[from + 2];
        }
    }
    if vector == 0 && entry == 0 && head == 0 {
        cache.seen[batch] += tokens_in.k.shape(2) as i32;
    }
}

/// Writes the rows of the tokens `0..tokens` into the pages of their sequences, after the tokens that these hold.
///
/// One unit per vector of a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn write_pages_kernel<E: Numeric, N: Size>(
    tokens_in: &NewTokens<E, N>,
    cache: &mut PageTensors<E, N>,
    #[define(E)] _element: ElemType,
) {
    let vectors = cache.k.shape(3) / tokens_in.k.vector_size().comptime();
    let (heads, tokens) = (tokens_in.k.shape(1), tokens_in.k.shape(2));
    let vector = ABSOLUTE_POS % vectors;
    let at = ABSOLUTE_POS / vectors;
    let (row, token) = (at / tokens, at % tokens);
    if row < tokens_in.k.shape(0) * heads {
        let held = cache.pages.lengths[row / heads] as usize;
        write_page_vector::<E, N>(tokens_in, cache, held, row, token, vector);
    }
}

/// Vector `vector` of token `token` of row `row`, as in [`write_pages_kernel`]; `held` is the length of its sequence.
#[cube]
pub(crate) fn write_page_vector<E: Numeric, N: Size>(
    tokens_in: &NewTokens<E, N>,
    cache: &mut PageTensors<E, N>,
    held: usize,
    row: usize,
    token: usize,
    vector: usize,
) {
    let size = tokens_in.k.vector_size().comptime();
    let (heads, page_len) = (cache.k.shape(1), cache.k.shape(2));
    let (batch, head) = (row / heads, row % heads);
    let key = held + token;
    let page = cache.pages.table[batch * cache.pages.max_pages as usize + key / page_len] as usize;
    let place = (page * heads + head) * page_len + key % page_len;
    let to = place * (cache.k.shape(3) / size) + vector;
    let from_k = row_at(&tokens_in.k, batch, head, token);
    let from_v = row_at(&tokens_in.v, batch, head, token);
    cache.k[to] = tokens_in.k[from_k / size + vector];
    cache.v[to] = tokens_in.v[from_v / size + vector];
    #[comptime]
    match &mut cache.scores {
        ComptimeOption::Some(cached) => {
            if vector == 0 {
                let scores = tokens_in.scores.as_ref().unwrap();
                let first = batch * scores.stride(0) + head * scores.stride(1);
                cached[place] = scores[first + token];
            }
        }
        ComptimeOption::None => {}
    }
}

/// Adds `tokens` to the length of every sequence; one unit each.
#[cube(launch_unchecked)]
pub(crate) fn lengthen_kernel(lengths: &mut [i32], batch: u32, tokens: u32) {
    if ABSOLUTE_POS < batch as usize {
        lengths[ABSOLUTE_POS] += tokens as i32;
    }
}

//! Writing tokens into the slots that were chosen for them.

use cubecl::prelude::*;

/// Words of an entry of a list of moves: the slot, the token that takes it, and the token's position. An entry whose
/// token is [`NONE`] is not a move.
pub(crate) const ENTRY: usize = 3;

/// No slot, or no token.
pub(crate) const NONE: i32 = -1;

/// Writes rows, scores and positions of the tokens of `moves` into their slots, and counts all `tokens` as seen.
///
/// One unit per vector of a row of an entry; the first of each row writes score and position, too. If `replayed`, the
/// entries of a row are one token each, in order, and a slot taken twice receives the last one.
///
/// | buffer | layout |
/// |---|---|
/// | `new_k`, `new_v` | `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis |
/// | `new_scores` | `[batch, kv_heads, tokens]`, last axis contiguous |
/// | `moves` | contiguous `[batch * kv_heads, entries]` of entries |
/// | `k`, `v` | contiguous `[batch, kv_heads, window, head_dim]`, the rows of the moves are overwritten |
/// | `score`, `position` | contiguous `[batch, kv_heads, window]`, likewise |
/// | `seen` | `[batch]`, `tokens` are added |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn commit_kernel<E: Numeric, N: Size>(
    new_k: &Tensor<Vector<E, N>>,
    new_v: &Tensor<Vector<E, N>>,
    new_scores: &Tensor<f32>,
    moves: &[i32],
    k: &mut Tensor<Vector<E, N>>,
    v: &mut Tensor<Vector<E, N>>,
    score: &mut [f32],
    position: &mut [i32],
    seen: &mut [i32],
    entries: u32,
    #[comptime] replayed: bool,
    #[define(E)] _element: ElemType,
) {
    let vectors = k.shape(3) / new_k.vector_size().comptime();
    let rows = k.shape(0) * k.shape(1);
    let vector = ABSOLUTE_POS % vectors;
    let at = ABSOLUTE_POS / vectors;
    let (row, entry) = (at / entries as usize, at % entries as usize);
    if row < rows {
        commit_vector::<E, N>(
            new_k, new_v, new_scores, moves, k, v, score, position, seen, entries, row, entry,
            vector, replayed,
        );
    }
}

/// Vector `vector` of entry `entry` of row `row`, as in [`commit_kernel`].
#[cube]
pub(crate) fn commit_vector<E: Numeric, N: Size>(
    new_k: &Tensor<Vector<E, N>>,
    new_v: &Tensor<Vector<E, N>>,
    new_scores: &Tensor<f32>,
    moves: &[i32],
    k: &mut Tensor<Vector<E, N>>,
    v: &mut Tensor<Vector<E, N>>,
    score: &mut [f32],
    position: &mut [i32],
    seen: &mut [i32],
    entries: u32,
    row: usize,
    entry: usize,
    vector: usize,
    #[comptime] replayed: bool,
) {
    let size = new_k.vector_size().comptime();
    let (heads, window) = (k.shape(1), k.shape(2));
    let vectors = k.shape(3) / size;
    let (batch, head) = (row / heads, row % heads);
    let from = (row * entries as usize + entry) * ENTRY;
    let (slot, token) = (moves[from], moves[from + 1]);
    let mut moved = token != comptime!(NONE);
    if comptime!(replayed) {
        for later in entry + 1..entries as usize {
            if moves[(row * entries as usize + later) * ENTRY] == slot {
                moved = false;
            }
        }
    }
    if moved {
        let (slot, token) = (slot as usize, token as usize);
        let to = (row * window + slot) * vectors + vector;
        let from_k = batch * new_k.stride(0) + head * new_k.stride(1) + token * new_k.stride(2);
        let from_v = batch * new_v.stride(0) + head * new_v.stride(1) + token * new_v.stride(2);
        k[to] = new_k[from_k / size + vector];
        v[to] = new_v[from_v / size + vector];
        if vector == 0 {
            let scores = batch * new_scores.stride(0) + head * new_scores.stride(1);
            score[row * window + slot] = new_scores[scores + token];
            position[row * window + slot] = moves[from + 2];
        }
    }
    if vector == 0 && entry == 0 && head == 0 {
        seen[batch] += new_k.shape(2) as i32;
    }
}

/// Writes the rows of the tokens `0..tokens` into the pages of their sequences, after the tokens that these hold.
///
/// One unit per vector of a row.
///
/// | buffer | layout |
/// |---|---|
/// | `new_k`, `new_v` | `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis |
/// | `table` | contiguous `[batch, max_pages]` |
/// | `lengths` | `[batch]` |
/// | `k`, `v` | contiguous `[pages, kv_heads, page_len, head_dim]`, the new rows are overwritten |
/// | `new_scores` | if `scored`: `[batch, kv_heads, tokens]`, last axis contiguous |
/// | `scores` | if `scored`: contiguous `[pages, kv_heads, page_len]`, the entries of the new rows are overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn write_pages_kernel<E: Numeric, N: Size>(
    new_k: &Tensor<Vector<E, N>>,
    new_v: &Tensor<Vector<E, N>>,
    table: &[i32],
    lengths: &[i32],
    k: &mut Tensor<Vector<E, N>>,
    v: &mut Tensor<Vector<E, N>>,
    new_scores: &Tensor<f32>,
    scores: &mut [f32],
    max_pages: u32,
    #[comptime] scored: bool,
    #[define(E)] _element: ElemType,
) {
    let vectors = k.shape(3) / new_k.vector_size().comptime();
    let (heads, tokens) = (new_k.shape(1), new_k.shape(2));
    let vector = ABSOLUTE_POS % vectors;
    let at = ABSOLUTE_POS / vectors;
    let (row, token) = (at / tokens, at % tokens);
    if row < new_k.shape(0) * heads {
        write_page_vector::<E, N>(
            new_k,
            new_v,
            table,
            lengths[row / heads] as usize,
            k,
            v,
            new_scores,
            scores,
            max_pages,
            row,
            token,
            vector,
            scored,
        );
    }
}

/// Vector `vector` of token `token` of row `row`, as in [`write_pages_kernel`]; `held` is the length of its sequence.
#[cube]
pub(crate) fn write_page_vector<E: Numeric, N: Size>(
    new_k: &Tensor<Vector<E, N>>,
    new_v: &Tensor<Vector<E, N>>,
    table: &[i32],
    held: usize,
    k: &mut Tensor<Vector<E, N>>,
    v: &mut Tensor<Vector<E, N>>,
    new_scores: &Tensor<f32>,
    scores: &mut [f32],
    max_pages: u32,
    row: usize,
    token: usize,
    vector: usize,
    #[comptime] scored: bool,
) {
    let size = new_k.vector_size().comptime();
    let (heads, page_len) = (k.shape(1), k.shape(2));
    let (batch, head) = (row / heads, row % heads);
    let key = held + token;
    let page = table[batch * max_pages as usize + key / page_len] as usize;
    let place = (page * heads + head) * page_len + key % page_len;
    let to = place * (k.shape(3) / size) + vector;
    let from_k = batch * new_k.stride(0) + head * new_k.stride(1) + token * new_k.stride(2);
    let from_v = batch * new_v.stride(0) + head * new_v.stride(1) + token * new_v.stride(2);
    k[to] = new_k[from_k / size + vector];
    v[to] = new_v[from_v / size + vector];
    if comptime!(scored) && vector == 0 {
        let from = batch * new_scores.stride(0) + head * new_scores.stride(1);
        scores[place] = new_scores[from + token];
    }
}

/// Adds `tokens` to the length of every sequence; one unit each.
#[cube(launch_unchecked)]
pub(crate) fn lengthen_kernel(lengths: &mut [i32], batch: u32, tokens: u32) {
    if ABSOLUTE_POS < batch as usize {
        lengths[ABSOLUTE_POS] += tokens as i32;
    }
}

//! The keys of a decode step: the keys of the cache, followed by the new tokens.

use crate::decode::commit::{ENTRY, NONE};
use crate::decode::tensors::{StepTensors, row_at};
use crate::finite::negative_infinity;
use crate::portable::blueprint::Blueprint;
use crate::portable::intervals::KeyIntervals;
use crate::portable::memory::{KeyRows, NotFinite, Row4, load_vector};
use cubecl::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeBlueprint {
    /// The tile; the query rows of a kv head are the outer rows, keys the inner ones.
    pub tile: Blueprint,
    /// True if the cache has pages, not slots. This is also among the options of the kernel's tensors, but CubeCL's
    /// disk cache does not see those, see `docs/upstream.md`.
    pub paged: bool,
    /// True if the scores of keys rank and hide them, and are not added to their logits.
    pub only_ranked: bool,
    /// True if a query attends to its last keys alone. Needed for the same reason as `paged`.
    pub windowed: bool,
}

/// The keys of one (sequence, kv head): `0..held` in the cache, then one for each new token. Times are those of the
/// step's queries: query `t` is the one of token `t`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepKeys {
    pub batch: usize,
    pub head: usize,
    /// Keys that the cache has room for (slots) or holds (pages).
    pub held: usize,
    pub tokens: usize,
    /// With slots: this head's first entry of the moves. With pages: the sequence's first page in the table.
    first_place: usize,
    /// The head's first slot among all rows; with pages, its first row within page 0.
    row: usize,
    page_len: usize,
    heads: usize,
}

#[cube]
impl StepKeys {
    /// The keys of kv head `CUBE_POS_X`, counted over all sequences.
    pub(crate) fn of_cube<F: Float, N: Size>(tensors: &StepTensors<F, N>) -> StepKeys {
        let (k, new_k) = (&tensors.k, &tensors.new_k);
        let heads = new_k.shape(1);
        let row = CUBE_POS_X as usize;
        let (batch, head) = (row / heads, row % heads);
        let tokens = new_k.shape(2);
        let mut held = k.shape(2);
        let mut first_place = row * tokens * ENTRY;
        let page_len = k.shape(2);
        let mut first = row * page_len;
        #[comptime]
        if let ComptimeOption::Some(pages) = &tensors.pages {
            held = pages.lengths[batch] as usize;
            first_place = batch * pages.max_pages as usize;
            first = head * page_len;
        }
        StepKeys {
            batch,
            head,
            held,
            tokens,
            first_place,
            row: first,
            page_len,
            heads,
        }
    }

    /// The row of a key of the cache, counted over all of it.
    fn cached<F: Float, N: Size>(&self, tensors: &StepTensors<F, N>, key: usize) -> usize {
        #[comptime]
        match &tensors.pages {
            ComptimeOption::Some(pages) => {
                let page = pages.table[self.first_place + key / self.page_len] as usize;
                self.row + page * self.heads * self.page_len + key % self.page_len
            }
            ComptimeOption::None => self.row + key,
        }
    }

    /// The first token from `from` on that takes `slot`; the number of tokens if none does.
    fn taken_at(&self, moves: &[i32], slot: i32, from: usize) -> usize {
        let mut at = self.tokens;
        for other in from..self.tokens {
            if at == self.tokens && moves[self.first_place + other * ENTRY] == slot {
                at = other;
            }
        }
        at
    }

    fn score<F: Float, N: Size>(&self, tensors: &StepTensors<F, N>, key: usize) -> f32 {
        let scores = tensors.scores.as_ref().unwrap();
        let new = self.batch * scores.new.stride(0) + self.head * scores.new.stride(1);
        if key < self.held {
            scores.cached[self.cached::<F, N>(tensors, key)]
        } else {
            scores.new[new + key - self.held]
        }
    }

    /// One past the last query that attends to a key that is attended to from `first` on: the query of the token that
    /// evicts it, or whose window it is out of. At most `first` if the key is never attended to.
    fn end<F: Float, N: Size>(
        &self,
        tensors: &StepTensors<F, N>,
        key: usize,
        first: usize,
        score: f32,
    ) -> usize {
        let mut end = self.tokens;
        #[comptime]
        if let ComptimeOption::Some(moves) = &tensors.moves {
            let mut slot = key as i32;
            let mut from = 0usize;
            if key >= self.held {
                slot = moves[self.first_place + first * ENTRY];
                from = first + 1;
            }
            end = self.taken_at(moves, slot, from);
            if slot == comptime!(NONE) {
                end = first;
            }
        }
        #[comptime]
        if let ComptimeOption::Some(window) = &tensors.window {
            // The query of token `t` attends to the keys from `held + t + 1 - window` on.
            let past = key + *window as usize;
            end = min(end, past - min(past, self.held));
        }
        if score == negative_infinity() {
            end = first;
        }
        end
    }

    /// Loads rows, scores and intervals of the keys `start..start + inner_rows`; keys at or past `stop` become zeros
    /// that no query attends to. All units cooperate; the caller synchronises.
    pub(crate) fn load<F: Float, N: Size>(
        &self,
        tensors: &StepTensors<F, N>,
        start: usize,
        stop: usize,
        intervals: &mut KeyIntervals,
        tile: &mut KeyRows,
        not_finite: &mut NotFinite,
        #[comptime] bp: DecodeBlueprint,
    ) {
        let rows = comptime!(bp.tile.inner_rows());
        let mut row = UNIT_POS as usize;
        while row < rows {
            let key = start + row;
            let mut value = 0.0f32;
            let mut first = 0usize;
            let mut end = 0usize;
            if key < stop {
                if key >= self.held {
                    first = key - self.held;
                }
                if comptime!(bp.tile.pattern.has_intervals()) {
                    value = self.score::<F, N>(tensors, key);
                }
                end = self.end::<F, N>(tensors, key, first, value);
            }
            if comptime!(bp.only_ranked) {
                value = 0.0f32;
            }
            intervals.set_key(row, first as i32, end as i32, value);
            row += comptime!(bp.tile.units());
        }

        let vectors = comptime!(bp.tile.vectors());
        let mut item = UNIT_POS as usize;
        while item < comptime!(bp.tile.inner_rows() * bp.tile.vectors()) {
            let (row, vector) = (item / vectors, item % vectors);
            let key = start + row;
            let mut own_k = Row4::new(0.0f32);
            let mut own_v = Row4::new(0.0f32);
            if key < stop && vector < comptime!(bp.tile.head_dim / 4) {
                if key < self.held {
                    let at = self.cached::<F, N>(tensors, key) * comptime!(bp.tile.head_dim);
                    own_k = load_vector::<F, N>(&tensors.k, at, vector);
                    own_v = load_vector::<F, N>(&tensors.v, at, vector);
                } else {
                    let token = key - self.held;
                    let at = row_at(&tensors.new_k, self.batch, self.head, token);
                    own_k = load_vector::<F, N>(&tensors.new_k, at, vector);
                    let at = row_at(&tensors.new_v, self.batch, self.head, token);
                    own_v = load_vector::<F, N>(&tensors.new_v, at, vector);
                }
                not_finite.check(own_v);
            }
            tile.k[row * comptime!(bp.tile.row_stride()) + vector] = own_k;
            tile.v[row * comptime!(bp.tile.row_stride()) + vector] = own_v;
            item += comptime!(bp.tile.units());
        }
    }
}

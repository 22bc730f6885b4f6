//! Visibility by an interval of positions per key.

use crate::pattern::position::{position, query_shift};
use crate::portable::args::{OrderedIntervals, RankedList, Sizes};
use crate::portable::blueprint::Blueprint;
use crate::portable::keys::KeyTiles;
use crate::portable::memory::TileRows;
use crate::portable::visibility::{Visibility, VisibilityExpand, is_blind, query_and_key};
use cubecl::prelude::*;

/// The positions of a tile's queries, and the intervals and scores of a tile's keys, in shared memory.
#[derive(CubeType)]
pub struct KeyIntervals {
    /// Position of each query; -1 selects nothing.
    position: Shared<[i32]>,
    first: Shared<[i32]>,
    /// One past the last position that attends to each key.
    end: Shared<[i32]>,
    score: Shared<[f32]>,
    /// True if the keys are the outer rows.
    #[cube(comptime)]
    keys_outer: bool,
}

#[cube]
impl KeyIntervals {
    /// Allocates room for the queries and keys of a tile.
    pub fn new(#[comptime] keys_outer: bool, #[comptime] bp: Blueprint) -> KeyIntervals {
        let queries = comptime!(bp.rows(!keys_outer));
        let keys = comptime!(bp.rows(keys_outer));
        KeyIntervals {
            position: Shared::<[i32]>::new_slice(queries),
            first: Shared::<[i32]>::new_slice(keys),
            end: Shared::<[i32]>::new_slice(keys),
            score: Shared::<[f32]>::new_slice(keys),
            keys_outer,
        }
    }

    pub(crate) fn set_query(&mut self, local: usize, position: i32) {
        self.position[local] = position;
    }

    /// Sets the interval and the score of key `local` of the tile.
    pub fn set_key(&mut self, local: usize, first: i32, end: i32, score: f32) {
        self.first[local] = first;
        self.end[local] = end;
        self.score[local] = score;
    }

    /// Sets the positions of a tile's queries. All units cooperate; the caller synchronises.
    pub fn set_queries(
        &mut self,
        queries: &TileRows,
        lse: ComptimeOption<&Shared<[f32]>>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(!self.keys_outer)) {
            let mut at = position(queries.first + row, sizes.q_len, sizes.k_len, bp.causal);
            if is_blind(lse, row) {
                at = i32::new(-1);
            }
            self.set_query(row, at);
            row += comptime!(bp.units());
        }
    }

    /// Sets the keys of a tile that streams past queries. All units cooperate; the caller synchronises.
    pub(crate) fn set_listed(
        &mut self,
        tiles: &KeyTiles,
        keys: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        let source = tiles.listed.unwrap();
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(self.keys_outer)) {
            let n = keys.first + row;
            // Past the end: an interval that contains no position.
            let mut first = i32::new(i32::MAX as i64);
            let mut end = 0i32;
            let mut score = 0.0f32;
            if n < keys.end {
                end = i32::new(i32::MAX as i64);
                let key = keys.index(n);
                score = source.scores[keys.batch * source.scores.stride(0)
                    + keys.head * source.scores.stride(1)
                    + key * source.scores.stride(2)];
                first = 0i32;
                if n >= tiles.full {
                    first = key as i32;
                    end = source.intervals[keys.batch * source.intervals.stride(0)
                        + keys.head * source.intervals.stride(1)
                        + 2 * key
                        + 1] as i32;
                }
            }
            self.set_key(row, first, end, score);
            row += comptime!(bp.units());
        }
    }

    /// Sets the keys that a cube owns. All units cooperate; the caller synchronises.
    pub(crate) fn set_ordered(
        &mut self,
        source: &OrderedIntervals,
        keys: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(self.keys_outer)) {
            let n = keys.first + row;
            // Past the end: an interval that contains no position.
            let mut first = i32::new(i32::MAX as i64);
            let mut end = 0i32;
            let mut score = 0.0f32;
            if n < keys.end {
                let key = keys.index(n);
                first = key as i32;
                end = source.ends[keys.list.as_ref().unwrap().base + n] as i32;
                score = source.scores[keys.batch * source.scores.stride(0)
                    + keys.head * source.scores.stride(1)
                    + key * source.scores.stride(2)];
            }
            self.set_key(row, first, end, score);
            row += comptime!(bp.units());
        }
    }

    /// Sets the keys that a cube of the rank kernel owns. All units cooperate; the caller synchronises.
    pub(crate) fn set_ranked(
        &mut self,
        source: &RankedList,
        keys: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        let k_len = source.scores.shape(2);
        let heads = source.scores.shape(1);
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(self.keys_outer)) {
            let n = keys.first + row;
            // Past the end: an interval that contains no position.
            let mut first = i32::new(i32::MAX as i64);
            let mut end = 0i32;
            let mut score = 0.0f32;
            if n < keys.end {
                let key = keys.index(n);
                let at = 2 * ((keys.batch * heads + keys.head) * k_len + key);
                first = source.spans[at] as i32;
                end = source.spans[at + 1] as i32;
                score = source.scores[keys.batch * source.scores.stride(0)
                    + keys.head * source.scores.stride(1)
                    + key * source.scores.stride(2)];
            }
            self.set_key(row, first, end, score);
            row += comptime!(bp.units());
        }
    }

    /// The first and one past the last query that attends to any key, equal if none does. Call it after a
    /// synchronisation.
    pub fn queries(&self, sizes: &Sizes, #[comptime] bp: Blueprint) -> (usize, usize) {
        let mut first = sizes.k_len as i32;
        let mut end = 0i32;
        for key in 0..comptime!(bp.rows(self.keys_outer)) {
            first = min(first, self.first[key]);
            end = max(end, self.end[key]);
        }
        let mut from = 0usize;
        let mut to = 0usize;
        if comptime!(bp.causal) {
            let shift = query_shift(sizes.q_len, sizes.k_len);
            from = max(first + shift, 0i32) as usize;
            to = max(end + shift, 0i32) as usize;
        } else {
            // All queries have the position of the last key.
            if end >= sizes.k_len as i32 {
                to = sizes.q_len;
            }
        }
        (from, max(from, to))
    }
}

#[cube]
impl Visibility for KeyIntervals {
    fn selected(&self, outer: usize, inner: usize) -> bool {
        let (query, key) = query_and_key(outer, inner, self.keys_outer);
        let position = self.position[query];
        self.first[key] <= position && position < self.end[key]
    }

    fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32 {
        let mut key = inner;
        if comptime!(self.keys_outer) {
            key = outer;
        }
        logit + self.score[key]
    }

    fn dropped(&self, value: f32, _outer: usize, _inner: usize) -> f32 {
        value
    }
}

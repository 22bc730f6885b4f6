//! Which pairs of a tile are selected, and their logits.

use crate::math::{TANH_SERIES_BELOW, tanh_near_zero};
use crate::portable::blueprint::Blueprint;
use cubecl::prelude::*;

/// Which pairs of an outer and an inner tile are selected.
#[cube]
pub(crate) trait Pairs {
    /// Whether the pair of an outer and an inner row is selected.
    fn selected(&self, outer: usize, inner: usize) -> bool;
}

/// The data that decides which pairs of an outer and an inner tile are selected, in shared memory.
#[derive(CubeType)]
pub(crate) struct Slots {
    /// Position of each query; -1 selects nothing.
    pub position: Shared<[i32]>,
    /// First position that attends to each key.
    pub first: Shared<[i32]>,
    /// One past the last position that attends to each key.
    pub end: Shared<[i32]>,
    /// Whether the keys are the outer rows.
    #[cube(comptime)]
    pub keys_outer: bool,
}

#[cube]
impl Slots {
    /// Allocates room for the queries and keys of a tile.
    pub(crate) fn new(#[comptime] keys_outer: bool, #[comptime] bp: Blueprint) -> Slots {
        let queries = comptime!(if keys_outer {
            bp.inner_rows()
        } else {
            bp.outer_rows()
        });
        let keys = comptime!(if keys_outer {
            bp.outer_rows()
        } else {
            bp.inner_rows()
        });
        Slots {
            position: Shared::<[i32]>::new_slice(queries),
            first: Shared::<[i32]>::new_slice(keys),
            end: Shared::<[i32]>::new_slice(keys),
            keys_outer,
        }
    }

    /// Sets the position of query `slot`.
    pub(crate) fn set_query(&mut self, slot: usize, position: i32) {
        self.position[slot] = position;
    }

    /// Sets the interval of key `slot`.
    pub(crate) fn set_key(&mut self, slot: usize, first: i32, end: i32) {
        self.first[slot] = first;
        self.end[slot] = end;
    }

    /// The first and one past the last query that attends to any key of an outer tile of keys; the same number twice if
    /// none does. To be called after a synchronisation.
    pub(crate) fn queries(
        &self,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: Blueprint,
    ) -> (usize, usize) {
        let mut first = k_len as i32;
        let mut end = 0i32;
        for key in 0..comptime!(bp.outer_rows()) {
            first = min(first, self.first[key]);
            end = max(end, self.end[key]);
        }
        let mut from = 0usize;
        let mut to = 0usize;
        if comptime!(bp.causal) {
            let shift = q_len as i32 - k_len as i32;
            from = max(first + shift, 0i32) as usize;
            to = max(end + shift, 0i32) as usize;
        } else {
            // All queries have the position of the last key.
            if end >= k_len as i32 {
                to = q_len;
            }
        }
        (from, max(from, to))
    }
}

#[cube]
impl Pairs for Slots {
    fn selected(&self, outer: usize, inner: usize) -> bool {
        let (mut query, mut key) = (outer, inner);
        if comptime!(self.keys_outer) {
            query = inner;
            key = outer;
        }
        let position = self.position[query];
        self.first[key] <= position && position < self.end[key]
    }
}

/// The scaled and optionally capped product of a query and a key.
#[cube]
pub(crate) fn logit(product: f32, scale: f32, softcap: f32, #[comptime] bp: Blueprint) -> f32 {
    let mut x = product * scale;
    if comptime!(bp.softcap) {
        let t = x / softcap;
        let square = t * t;
        // A driver's `tanh` may have an absolute error, as Mesa's CPU driver's has.
        let near = tanh_near_zero(t, square);
        x = softcap * select(square < TANH_SERIES_BELOW, near, t.tanh());
    }
    x
}

/// The derivative of [`logit`] by `product`, from its value.
#[cube]
pub(crate) fn logit_slope(logit: f32, scale: f32, softcap: f32, #[comptime] bp: Blueprint) -> f32 {
    let mut slope = scale;
    if comptime!(bp.softcap) {
        let t = logit / softcap;
        slope = scale * (1.0f32 - t * t);
    }
    slope
}

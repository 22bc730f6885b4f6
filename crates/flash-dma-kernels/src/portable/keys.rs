//! The keys that a query tile attends to, streamed tile by tile.

use crate::pattern::position::position;
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::{Row4, load_rows};
use crate::portable::visibility::Slots;
use cubecl::prelude::*;

/// Location of the keys of one query tile: in its list if `bp.pattern.has_intervals()`, else the keys `0..total`.
#[derive(CubeType)]
pub(crate) struct TileKeys {
    /// First element of the list.
    base: usize,
    /// Keys that every query of the tile attends to; they come first.
    full: usize,
    /// All keys.
    pub total: usize,
}

#[cube]
impl TileKeys {
    /// The keys of the tile that begins at `first_query`, in the row `row = batch * kv_heads + kv_head`
    /// of the lists. Without causal masking all tiles share list 0; with it, the launch lists the tile
    /// of `CUBE_POS_X` at `CUBE_POS_X`.
    pub(crate) fn of_query_tile(
        list: &Tensor<u32>,
        counts: &Tensor<u32>,
        row: usize,
        first_query: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: Blueprint,
    ) -> TileKeys {
        let mut base = 0usize;
        let mut full = 0usize;
        let mut total = 0usize;
        if comptime!(bp.pattern.has_intervals()) {
            let mut tile = 0usize;
            if comptime!(bp.causal) {
                tile = CUBE_POS_X as usize;
            }
            base = row * list.stride(0) + tile * list.stride(1);
            let at = row * counts.stride(0) + tile * counts.stride(1);
            full = counts[at] as usize;
            total = counts[at + 1] as usize;
        } else {
            let last = min(first_query + comptime!(bp.outer_rows()), q_len) - 1;
            let seen = position(last, q_len, k_len, bp.causal) + 1;
            if seen > 0 {
                total = seen as usize;
            }
        }
        TileKeys { base, full, total }
    }

    /// Loads the rows of the keys `start..start + inner_rows` of these keys from `k` and `v`, with their
    /// intervals and scores. All units cooperate; the caller synchronises.
    ///
    /// `batch` and `kv_head` say which keys; `not_finite[slot]` is set as by [`load_rows`].
    pub(crate) fn load<F: Float, N: Size>(
        &self,
        k: &Tensor<Vector<F, N>>,
        v: &Tensor<Vector<F, N>>,
        scores: &Tensor<f32>,
        intervals: &Tensor<u32>,
        list: &Tensor<u32>,
        batch: usize,
        kv_head: usize,
        start: usize,
        k_rows: &mut Shared<[Row4]>,
        v_rows: &mut Shared<[Row4]>,
        key_scores: &mut Shared<[f32]>,
        slots: &mut Slots,
        not_finite: &mut Shared<[u32]>,
        slot: usize,
        #[comptime] bp: Blueprint,
    ) {
        let rows = comptime!(bp.inner_rows());
        let mut row = UNIT_POS as usize;
        while row < rows {
            let n = start + row;
            // Past the end: an interval that contains no position.
            let mut first = i32::new(i32::MAX as i64);
            let mut end = 0i32;
            let mut score = 0.0f32;
            if n < self.total {
                end = i32::new(i32::MAX as i64);
                if comptime!(bp.pattern.has_intervals()) {
                    let key = list[self.base + n] as usize;
                    score = scores[batch * scores.stride(0)
                        + kv_head * scores.stride(1)
                        + key * scores.stride(2)];
                    first = 0i32;
                    if n >= self.full {
                        first = key as i32;
                        end = intervals[batch * intervals.stride(0)
                            + kv_head * intervals.stride(1)
                            + 2 * key
                            + 1] as i32;
                    }
                } else {
                    first = 0i32;
                    if comptime!(bp.causal) {
                        first = n as i32;
                    }
                }
            }
            slots.set_key(row, first, end);
            key_scores[row] = score;
            row += comptime!(bp.units());
        }
        let k_base = batch * k.stride(0) + kv_head * k.stride(1);
        let v_base = batch * v.stride(0) + kv_head * v.stride(1);
        load_rows::<F, N>(
            k,
            k_base,
            k.stride(2),
            list,
            self.base,
            start,
            self.total,
            k_rows,
            not_finite,
            slot,
            rows,
            bp.pattern.has_intervals(),
            bp,
        );
        load_rows::<F, N>(
            v,
            v_base,
            v.stride(2),
            list,
            self.base,
            start,
            self.total,
            v_rows,
            not_finite,
            slot,
            rows,
            bp.pattern.has_intervals(),
            bp,
        );
    }
}

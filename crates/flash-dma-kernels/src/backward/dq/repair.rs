//! NaN in dQ from keys that are not finite.
//!
//! The products treat the elements of such keys on boundary tiles as zero, as `0 * NaN` would reach rows that do not
//! select the key. For a row that selects it the logit is not finite, so dS is zero or NaN and its product with the
//! element is NaN: that is written here, after the gradients. Rare, hence simple: everything is read from global memory
//! again.

use crate::backward::dq::rows::LaneRows;
use crate::finite::is_finite;
use crate::matrix::args::{KeySource, Operands, SavedRows};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::repair::ColumnKey;
use crate::matrix::rows::TileRow;
use crate::vectors::pick;
use cubecl::prelude::*;

/// Sets dQ of the two rows of this lane to NaN in those elements, among the ones that the lane has written, where a key
/// that they select is not finite.
#[cube]
pub(crate) fn mark_pair<E: Float>(
    operands: &Operands<E, Const<8>>,
    source: &KeySource,
    grad_q: &mut [Vector<E, Const<2>>],
    rows: &LaneRows,
    attended: &AttendedKeys,
    full_tiles: usize,
) {
    let none = f32::new(f32::NEG_INFINITY);
    let bp = comptime!(attended.own.bp);
    let from = full_tiles * comptime!(bp.key_tile);
    let intervals = attended.interval_row();
    if rows.to.has_upper && rows.lse.upper != none {
        let (to, row) = (rows.to.upper, &rows.pair.upper);
        mark_elements::<E>(operands, source, grad_q, row, attended, intervals, to, from);
    }
    if rows.to.has_lower && rows.lse.lower != none {
        let (to, row) = (rows.to.lower, &rows.pair.lower);
        mark_elements::<E>(operands, source, grad_q, row, attended, intervals, to, from);
    }
}

/// Checks the keys from column `from` on, with intervals at row `intervals`; `to` is the row's index in `grad_q`.
#[cube]
fn mark_elements<E: Float>(
    operands: &Operands<E, Const<8>>,
    source: &KeySource,
    grad_q: &mut [Vector<E, Const<2>>],
    row: &TileRow,
    attended: &AttendedKeys,
    intervals: usize,
    to: usize,
    from: usize,
) {
    let bp = comptime!(attended.own.bp);
    let quad = UNIT_POS_X as usize % 4;
    let end = attended.own.k_len as i32;
    for column in from..attended.keys.total {
        let listed = ColumnKey::new(column, end, row, source, attended, intervals);
        if listed.first <= row.position && row.position < listed.end {
            for c in 0..comptime!(bp.segments()) {
                let rows = &attended.k_rows;
                let pair = pick::<E>(operands.k[rows.base + listed.key * rows.stride + c], quad);
                let at = to * comptime!(bp.head_dim / 2) + c * 4 + quad;
                #[unroll]
                for e in 0..2usize {
                    if !is_finite(pair.extract(e)) {
                        let mut values = grad_q[at];
                        values.insert(e, E::cast_from(f32::new(f32::NAN)));
                        grad_q[at] = values;
                    }
                }
            }
        }
    }
}

/// Sets dQ of this unit's own row of the query tile to NaN in the elements where a key that it selects is not finite.
/// All of dQ must be visible.
#[cube]
pub(crate) fn mark_row<E: Float>(
    operands: &Operands<E, Const<8>>,
    source: &KeySource,
    saved: &SavedRows,
    grad_q: &mut [Vector<E, Const<2>>],
    attended: &AttendedKeys,
    full_tiles: usize,
) {
    let bp = comptime!(attended.own.bp);
    let own = &attended.own;
    let row = TileRow::new(UNIT_POS as usize, own);
    let to = (own.batch * own.q_heads + row.head) * own.q_len + row.query;
    if row.valid && saved.lse[to] != f32::new(f32::NEG_INFINITY) {
        let mut column = full_tiles * comptime!(bp.key_tile);
        while column < attended.keys.total {
            let end = own.k_len as i32;
            let interval_row = attended.interval_row();
            let listed = ColumnKey::new(column, end, &row, source, attended, interval_row);
            if listed.first <= row.position && row.position < listed.end {
                for c in 0..comptime!(bp.segments()) {
                    let rows = &attended.k_rows;
                    let values = operands.k[rows.base + listed.key * rows.stride + c];
                    #[unroll]
                    for pair in 0..4usize {
                        let at = to * comptime!(bp.head_dim / 2) + c * 4 + pair;
                        #[unroll]
                        for e in 0..2usize {
                            let value = f32::cast_from(values.extract(comptime!(pair * 2 + e)));
                            if !is_finite(value) {
                                let mut sums = grad_q[at];
                                sums.insert(e, E::cast_from(f32::new(f32::NAN)));
                                grad_q[at] = sums;
                            }
                        }
                    }
                }
            }
            column += 1;
        }
    }
}

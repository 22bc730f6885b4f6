//! NaN and infinite values of boundary keys.
//!
//! A product over a tile multiplies the value of a key that a row does not select by a probability of zero, and
//! `0 * NaN` is NaN: it would leak into rows that never attend to the key. On boundary tiles [`zero_not_finite`]
//! therefore zeroes such elements. This module adds them to the rows that do select their key, after the outputs are
//! written. Full tiles need none of this: there every row selects every key.

use crate::alibi::biased;
use crate::dropout::column_word;
use crate::finite::is_finite;
use crate::matrix::args::{KeySource, Operands, Outputs};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::dropout::word_of;
use crate::matrix::logit_scale::ExactLse;
use crate::matrix::rows::{TileRow, row_alibi};
use crate::matrix::stages::{RowAddress, copied_segment, place_of};
use crate::matrix::tile_keys::listed_key;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// A key of a tile, and the positions from which rows see it, read from global memory.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ColumnKey {
    pub key: usize,
    pub first: i32,
    pub end: i32,
}

#[cube]
impl ColumnKey {
    /// The key of column `column`; without a list or a mask, keys are seen until `end`. Positions count keys from
    /// `keys.begin`, as the key does. `interval_row` is that of `attended`.
    pub(crate) fn new(
        column: usize,
        end: i32,
        row: &TileRow,
        source: &KeySource,
        attended: &AttendedKeys,
        interval_row: usize,
    ) -> ColumnKey {
        let bp = comptime!(attended.own.bp);
        let mut key = column;
        let mut first = column as i32;
        let mut end = end;
        if comptime!(bp.pattern.has_intervals()) {
            let lists = source.intervals.as_ref().unwrap();
            key = lists.list[attended.keys.list + column] as usize;
            let interval = lists.intervals[interval_row + key];
            first = interval.extract(0usize) as i32;
            end = interval.extract(1usize) as i32;
        } else if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            key = listed_key(&plan.list, &attended.keys, column);
            // It sees everything before the end of the keys, and of causal masking.
            first = i32::new(comptime!(i32::MIN as i64));
            if !attended.mask.sees(source, &attended.own, row, column) {
                end = first;
            }
        }
        ColumnKey { key, first, end }
    }
}

/// Adds `p v` for every non-finite element `v` of the boundary tiles' keys to the outputs, which must be written and
/// visible: each unit owns one row of the query tile. `first_head` is the index of the sequence's first head in the
/// outputs. The rows of Q have vectors of `q_width` elements.
///
/// Rare, hence simple: a unit walks all keys and reads everything from global memory again.
#[cube]
pub(crate) fn add_not_finite<E: Float, O: Float, NQ: Size>(
    operands: &Operands<E, NQ>,
    source: &KeySource,
    outputs: &mut Outputs<O>,
    attended: &AttendedKeys,
    full_tiles: usize,
    first_head: usize,
    #[comptime] q_width: usize,
) {
    let bp = comptime!(attended.own.bp);
    let own = &attended.own;
    let row = TileRow::new(UNIT_POS as usize, own).starting_at(attended.keys.begin);
    let q_row = own.offset(&operands.q, &row) / q_width;
    let interval_row = attended.interval_row();
    let lse_row = (first_head + row.head) * own.q_len + row.query;
    let out_row = outputs
        .order
        .place(first_head * own.q_len, row.head, row.query);
    for column in full_tiles * comptime!(bp.key_tile)..attended.keys.total {
        let end = i32::new(comptime!(i32::MAX as i64));
        let listed = ColumnKey::new(column, end, &row, source, attended, interval_row);
        if row.valid && listed.first <= row.position && row.position < listed.end {
            let key = listed.key;
            if !key_is_finite::<E>(&operands.v, &attended.v_rows, key, bp) {
                let x = logit::<E, NQ>(operands, source, attended, &row, key, q_row, q_width);
                // Only the sign of a non-finite number's factor matters, so the rounded LSE serves.
                let row_lse = ExactLse {
                    lse: outputs.lse[lse_row],
                    rest: 0.0f32,
                };
                let p = weighed(row_lse.probability(x), key, &row, attended);
                add_value::<E, O>(&operands.v, &attended.v_rows, key, p, outputs, out_row, bp);
            }
        }
    }
}

/// A probability times the factor of its pair. Keys count from `keys.begin`.
#[cube]
fn weighed(p: f32, key: usize, row: &TileRow, attended: &AttendedKeys) -> f32 {
    #[comptime]
    match &attended.dropout {
        ComptimeOption::Some(seed) => {
            let column = column_word(attended.keys.begin + key, seed);
            p * seed.weight(word_of(seed, &attended.own, row), column)
        }
        ComptimeOption::None => p,
    }
}

#[cube]
fn key_is_finite<E: Float>(
    values: &Tensor<Segment<E>>,
    rows: &RowAddress,
    key: usize,
    #[comptime] bp: MmaBlueprint,
) -> bool {
    let mut finite = true;
    for c in 0..comptime!(bp.segments()) {
        let segment = values[rows.base + key * rows.stride + c];
        finite = finite && are_finite::<E>(segment);
    }
    finite
}

/// The logit of a row, which begins at vector `q_row` of Q, and a key.
#[cube]
fn logit<E: Float, NQ: Size>(
    operands: &Operands<E, NQ>,
    source: &KeySource,
    attended: &AttendedKeys,
    row: &TileRow,
    key: usize,
    q_row: usize,
    #[comptime] q_width: usize,
) -> f32 {
    let bp = comptime!(attended.own.bp);
    let mut product = 0.0f32;
    for c in 0..comptime!(bp.segments()) {
        let b = operands.k[attended.k_rows.base + key * attended.k_rows.stride + c];
        #[unroll]
        for e in 0..8usize {
            let a = operands.q[q_row + c * comptime!(8 / q_width) + comptime!(e / q_width)];
            let a = f32::cast_from(a.extract(comptime!(e % q_width)));
            product += a * f32::cast_from(b.extract(e));
        }
    }
    let mut z = 0.0f32;
    if comptime!(bp.pattern.has_intervals() || bp.pattern.has_key_bias()) {
        let scores = source.bias.as_ref().unwrap();
        z = scores[attended.score_row + key];
    }
    if comptime!(bp.pattern.has_pair_bias()) {
        let scores = source.bias.as_ref().unwrap();
        z = attended.bias.at(scores, row.query, key);
    }
    let alibi = row_alibi(&source.slopes, &attended.own, row);
    z = biased(
        &alibi,
        z,
        f32::cast_from((attended.keys.begin + key) as u32),
    );
    attended.scale.apply(product, z)
}

/// Adds `p` times the non-finite elements of the row of key `key` in V to row `out_row` of the output.
#[cube]
fn add_value<E: Float, O: Float>(
    v: &Tensor<Segment<E>>,
    rows: &RowAddress,
    key: usize,
    p: f32,
    outputs: &mut Outputs<O>,
    out_row: usize,
    #[comptime] bp: MmaBlueprint,
) {
    for c in 0..comptime!(bp.segments()) {
        let values = v[rows.base + key * rows.stride + c];
        #[unroll]
        for pair in 0..4usize {
            let at = out_row * comptime!(bp.head_dim / 2) + c * 4 + pair;
            let mut sums = outputs.out[at];
            #[unroll]
            for e in 0..2usize {
                let value = f32::cast_from(values.extract(comptime!(pair * 2 + e)));
                if !is_finite(value) {
                    let sum = f32::cast_from(sums.extract(e)) + p * value;
                    sums.insert(e, O::cast_from(sum));
                }
            }
            outputs.out[at] = sums;
        }
    }
}

#[cube]
fn are_finite<E: Float>(values: Segment<E>) -> bool {
    let mut finite = true;
    #[unroll]
    for e in 0..8usize {
        finite = finite && is_finite(f32::cast_from(values.extract(e)));
    }
    finite
}

/// Zeroes the elements of tile `tile` in `rows`, one of the buffers of [`Stages`](crate::matrix::stages::Stages), that
/// are not finite, and returns true if there are any: on a tile that some row does not see completely, `0 * NaN` would
/// leak them into that row. This unit checks the elements that it copied itself, which must have landed; without `zero`
/// it only checks.
#[cube]
pub(crate) fn zero_not_finite<E: Float>(
    rows: &mut Shared<[Segment<E>]>,
    tile: usize,
    #[comptime] zero: bool,
    #[comptime] bp: MmaBlueprint,
) -> bool {
    let base = tile % comptime!(bp.stages) * comptime!(bp.key_tile * bp.segments());
    let mut any = false;
    #[unroll]
    for c in 0..comptime!(bp.copies()) {
        let own = copied_segment(c, comptime!(bp.units()), comptime!(bp.segments()));
        if own.row < comptime!(bp.key_tile) {
            let place = base + place_of(own.row, own.col, bp);
            let mut values = rows[place];
            let mut finite = true;
            #[unroll]
            for e in 0..8usize {
                if !is_finite(f32::cast_from(values.extract(e))) {
                    finite = false;
                    values.insert(e, E::from_int(0));
                }
            }
            if !finite {
                any = true;
                if comptime!(zero) {
                    rows[place] = values;
                }
            }
        }
    }
    any
}

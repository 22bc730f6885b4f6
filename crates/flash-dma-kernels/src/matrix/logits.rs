//! Logits and their visibility.

use crate::alibi::biased;
use crate::matrix::args::KeySource;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::logit_scale::LogitScale;
use crate::matrix::mask::{SeenPair, hide_masked};
use crate::matrix::rows::{RowPair, TileRow};
use crate::matrix::softmax::PerRow;
use crate::matrix::stages::Stages;
use cubecl::prelude::*;

/// True if the query of `row` attends to column `col` of key tile `tile`.
#[cube]
pub(crate) fn sees<E: Float>(
    row: &TileRow,
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    k_len: usize,
    #[comptime] bp: MmaBlueprint,
) -> bool {
    // Key `n` is visible from position `n` on: to all positions if there is no causal mask.
    let mut first = (tile * comptime!(bp.key_tile) + col) as i32;
    let mut end = k_len as i32;
    if comptime!(bp.pattern.has_intervals()) {
        let stage = tile % comptime!(bp.stages);
        let interval = stages.intervals[stage * comptime!(bp.key_tile) + col];
        first = interval.extract(0usize) as i32;
        end = interval.extract(1usize) as i32;
    }
    first <= row.position && row.position < end
}

/// Additions to a column's scaled and capped products except biases per pair: the score and both rows' ALiBi.
#[cube]
pub(crate) fn scores<E: Float>(
    rows: &RowPair,
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    #[comptime] bp: MmaBlueprint,
) -> PerRow {
    let z = score::<E>(stages, tile, col, bp);
    let z = PerRow { upper: z, lower: z };
    with_alibi::<E>(z, rows, stages, tile, col, bp)
}

/// The score or bias of column `col` of key tile `tile`; 0 without.
#[cube]
fn score<E: Float>(
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    #[comptime] bp: MmaBlueprint,
) -> f32 {
    let mut z = 0.0f32;
    if comptime!(bp.pattern.has_intervals() || bp.pattern.has_key_bias()) {
        let stage = tile % comptime!(bp.stages);
        z = stages.scores[stage * comptime!(bp.key_tile) + col];
    }
    z
}

/// The logits of key tile `tile` of a list, from its products, in the layout of [`tile_logits`], plus the bias if
/// [`bp.pattern.has_pair_bias()`](MmaBlueprint); on a `boundary` tile they are -inf where a row does not see a key, as
/// given by `seen` if `bp.pattern.is_planned()`.
///
/// Boundary tiles are masked in a separate pass: a branch per element would keep other instructions from overlapping.
#[cube]
pub(crate) fn visible_logits<E: Float, N: Size>(
    products: &Vector<f32, N>,
    stages: &Stages<E>,
    source: &KeySource,
    attended: &AttendedKeys,
    rows: &RowPair,
    seen: &SeenPair,
    tile: usize,
    boundary: bool,
) -> Vector<f32, N> {
    let bp = comptime!(attended.own.bp);
    let mut s = tile_logits::<E, N>(products, rows, stages, tile, &attended.scale, bp);
    if comptime!(bp.pattern.has_pair_bias()) {
        let first = attended.first_key(source, tile);
        let scores = source.bias.as_ref().unwrap();
        s = (attended.bias).add::<N>(&s, scores, &attended.own, rows, first);
    }
    if boundary {
        if comptime!(bp.pattern.is_planned()) {
            s = hide_masked::<N>(&s, seen, bp);
        } else {
            s = hide_unseen::<E, N>(&s, rows, stages, tile, attended.own.k_len, bp);
        }
    }
    s
}

/// The logits of an accumulator: the rows of a warp by the key tile's columns, of which this lane holds columns
/// `8 n + 2 quad` and `8 n + 2 quad + 1` of its two rows, at `4 n` and `4 n + 2`.
#[cube]
fn tile_logits<E: Float, N: Size>(
    products: &Vector<f32, N>,
    rows: &RowPair,
    stages: &Stages<E>,
    tile: usize,
    scale: &LogitScale,
    #[comptime] bp: MmaBlueprint,
) -> Vector<f32, N> {
    let quad = UNIT_POS_X as usize % 4;
    let mut logits = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let z = scores::<E>(rows, stages, tile, comptime!(n * 8 + e) + quad * 2, bp);
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            logits.insert(at0, scale.apply(products.extract(at0), z.upper));
            logits.insert(at1, scale.apply(products.extract(at1), z.lower));
        }
    }
    logits
}

/// [`tile_logits`] with -inf where a row does not see a key.
#[cube]
fn hide_unseen<E: Float, N: Size>(
    logits: &Vector<f32, N>,
    rows: &RowPair,
    stages: &Stages<E>,
    tile: usize,
    k_len: usize,
    #[comptime] bp: MmaBlueprint,
) -> Vector<f32, N> {
    let quad = UNIT_POS_X as usize % 4;
    let none = f32::new(f32::NEG_INFINITY);
    let mut hidden = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let upper = sees::<E>(&rows.upper, stages, tile, col, k_len, bp);
            let x0 = select(upper, logits.extract(at0), none);
            let lower = sees::<E>(&rows.lower, stages, tile, col, k_len, bp);
            let x1 = select(lower, logits.extract(at1), none);
            hidden.insert(at0, x0);
            hidden.insert(at1, x1);
        }
    }
    hidden
}

/// Adds both rows' ALiBi to `z`, a part of the logits of column `col` of key tile `tile`.
#[cube]
pub(crate) fn with_alibi<E: Float>(
    z: PerRow,
    rows: &RowPair,
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    #[comptime] bp: MmaBlueprint,
) -> PerRow {
    #[comptime]
    match &stages.keys {
        ComptimeOption::Some(keys) => {
            let stage = tile % comptime!(bp.stages);
            let key = keys[stage * comptime!(bp.key_tile) + col];
            PerRow {
                upper: biased(&rows.upper_alibi, z.upper, key),
                lower: biased(&rows.lower_alibi, z.lower, key),
            }
        }
        ComptimeOption::None => z,
    }
}

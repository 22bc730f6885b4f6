//! Logits and their visibility.

use crate::args::Scaling;
use crate::math::{TANH_SERIES_BELOW, tanh_near_zero};
use crate::matrix::args::KeySource;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::mask::{SeenPair, hide_masked};
use crate::matrix::ptx::{ex2, reciprocal};
use crate::matrix::query_tile::{RowPair, TileRow};
use crate::matrix::stages::Stages;
use cubecl::prelude::*;

/// Factors of a logit.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LogitScale {
    /// Factor of the product: `scale`; with a softcap `c`, `scale / c`.
    pub inner: f32,
    /// With a softcap: `c`, and `1 / c`.
    pub outer: f32,
    pub inverse: f32,
}

#[cube]
impl LogitScale {
    pub(crate) fn new(scaling: &Scaling, #[comptime] capped: bool) -> LogitScale {
        let mut inner = scaling.scale;
        let mut inverse = 1.0f32;
        if comptime!(capped) {
            inner = scaling.scale / scaling.softcap;
            inverse = 1.0f32 / scaling.softcap;
        }
        LogitScale {
            inner,
            outer: scaling.softcap,
            inverse,
        }
    }

    /// The logit of a product and a score, natural units.
    pub(crate) fn apply(&self, product: f32, score: f32, #[comptime] capped: bool) -> f32 {
        if comptime!(capped) {
            fma(self.outer, tanh(product * self.inner), score)
        } else {
            fma(product, self.inner, score)
        }
    }

    /// `exp(logit - reference)` of a product and a score, `scaled` as in [`exp_of`]; without a score in one
    /// multiply-add less.
    pub(crate) fn weight(
        &self,
        product: f32,
        score: f32,
        scaled: f32,
        #[comptime] capped: bool,
        #[comptime] scored: bool,
    ) -> f32 {
        let mut exponent = fma(
            product,
            self.inner * comptime!(core::f32::consts::LOG2_E),
            scaled,
        );
        if comptime!(capped || scored) {
            let x = self.apply(product, score, capped);
            exponent = fma(x, comptime!(core::f32::consts::LOG2_E), scaled);
        }
        ex2(exponent)
    }

    /// The derivative of the logit by `scale * product`, from the logit without its score.
    pub(crate) fn slope(&self, logit: f32, #[comptime] capped: bool) -> f32 {
        let mut slope = 1.0f32;
        if comptime!(capped) {
            let t = logit * self.inverse;
            slope = fma(-t, t, 1.0f32);
        }
        slope
    }
}

/// `exp(x - reference)` by one multiply-add and one special-function instruction; `scaled` is
/// `-log2(e) * reference`.
#[cube]
pub(crate) fn exp_of(x: f32, scaled: f32) -> f32 {
    ex2(fma(x, comptime!(core::f32::consts::LOG2_E), scaled))
}

/// The factor that rescales sums of `exp(x - old)` to the reference `new`, which is not less than `old`. Exactly 1
/// where both are the same number: the exponential of a number against its own rounded product is off by that rounding,
/// 1e-4 at logits of 2000, and sums are rescaled again and again.
#[cube]
pub(crate) fn rescale_to(old: f32, new: f32) -> f32 {
    let none = f32::new(f32::NEG_INFINITY);
    let reference = -new * comptime!(core::f32::consts::LOG2_E);
    let factor = exp_of(old, select(new == none, 0.0f32, reference));
    select(old == new, 1.0f32, factor)
}

/// `tanh(x) = 1 - 2 / (1 + e^(2x))` by the special-function unit, whose absolute error is a few 1e-7; near 0, where
/// most capped logits lie and that would be a large part of them, by the series. The `tanh.approx` instruction's error,
/// 5e-4, would show in the logits.
#[cube]
fn tanh(x: f32) -> f32 {
    let e = ex2(x * comptime!(2.0 * core::f32::consts::LOG2_E));
    let far = fma(-2.0f32, reciprocal(1.0f32 + e), 1.0f32);
    let square = x * x;
    let near = tanh_near_zero(x, square);
    select(square < TANH_SERIES_BELOW, near, far)
}

/// Whether the query of `row` attends to slot `col` of key tile `tile`.
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

/// The score or bias of slot `col` of key tile `tile`; 0 without.
#[cube]
pub(crate) fn score<E: Float>(
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
/// [`bp.pattern.has_pair_bias()`](MmaBlueprint); on a `boundary` tile they are -inf where a row does not see a key.
/// With `bp.pattern.is_planned()` `seen` says which.
///
/// Boundary tiles are masked in a separate pass: a branch per element would prevent the other instructions from
/// overlapping.
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
    let mut s = tile_logits::<E, N>(products, stages, tile, &attended.scale, bp);
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
            let z = score::<E>(stages, tile, comptime!(n * 8 + e) + quad * 2, bp);
            #[unroll]
            for row in 0..2usize {
                let at = comptime!(n * 4 + row * 2 + e);
                logits.insert(at, scale.apply(products.extract(at), z, bp.softcap));
            }
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
            let x0 = select(
                sees::<E>(&rows.upper, stages, tile, col, k_len, bp),
                logits.extract(at0),
                none,
            );
            let x1 = select(
                sees::<E>(&rows.lower, stages, tile, col, k_len, bp),
                logits.extract(at1),
                none,
            );
            hidden.insert(at0, x0);
            hidden.insert(at1, x1);
        }
    }
    hidden
}

//! Functions that drivers compute too inaccurately, and rounding errors.

use crate::finite::is_finite;
use cubecl::prelude::*;

/// The squares for which [`tanh_near_zero`] is exact to rounding.
pub(crate) const TANH_SERIES_BELOW: f32 = 1.0 / 16.0;

/// `tanh(x)` by its series, for `square = x * x` below [`TANH_SERIES_BELOW`]; the next term is 2e-9 of a number below
/// 1/4.
#[cube]
pub(crate) fn tanh_near_zero(x: f32, square: f32) -> f32 {
    let mut series = fma(
        square,
        comptime!(62.0f32 / 2835.0),
        comptime!(-17.0f32 / 315.0),
    );
    series = fma(series, square, comptime!(2.0f32 / 15.0));
    series = fma(series, square, comptime!(-1.0f32 / 3.0));
    fma(series * square, x, x)
}

/// `1 / (1 + e^-x)` for `x` of any size; NaN stays NaN.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    select(x < 0.0f32, e, 1.0f32) / (1.0f32 + e)
}

/// `ln(1 + e^x)` for `x` of any size; NaN stays NaN.
#[cube]
pub(crate) fn softplus(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    softplus_of(x, e / (2.0f32 + e))
}

/// [`softplus`] from `s = e / (2 + e)` with `e = exp(-|x|)`: `ln(1 + e) = 2 artanh(s)`, whose series in `s <= 1/3` ends
/// with an error of 1e-8.
#[cube]
pub(crate) fn softplus_of(x: f32, s: f32) -> f32 {
    let u = s * s;
    let mut series = fma(u, comptime!(1.0f32 / 13.0), comptime!(1.0f32 / 11.0));
    series = fma(series, u, comptime!(1.0f32 / 9.0));
    series = fma(series, u, comptime!(1.0f32 / 7.0));
    series = fma(series, u, comptime!(1.0f32 / 5.0));
    series = fma(series, u, comptime!(1.0f32 / 3.0));
    series = fma(series, u, 1.0f32);
    let positive = select(x > 0.0f32, x, 0.0f32);
    fma(2.0f32 * s, series, positive)
}

/// `ln(1 + x)` of an `x` that is not negative, to f32's relative accuracy; NaN stays NaN. CubeCL's `log1p` rounds `1 + x`
/// first, which loses a small `x`.
#[cube]
pub(crate) fn ln_one_plus(x: f32) -> f32 {
    let small = softplus_of(0.0f32, x / (2.0f32 + x));
    select(x > 1.0f32, (1.0f32 + x).ln(), small)
}

/// The rounding error of an LSE, `reference + log_sum`; 0 unless the LSE is finite.
#[cube]
pub(crate) fn log_sum_rest(reference: f32, log_sum: f32, lse: f32) -> f32 {
    select(is_finite(lse), log_sum - (lse - reference), 0.0f32)
}

/// The error of rounding `x` to `E`; 0 if the result is NaN or infinite, as f16 is for numbers that f32 still holds.
#[cube]
pub(crate) fn rounding_loss<E: Float>(x: f32) -> f32 {
    let rounded = f32::cast_from(E::cast_from(x));
    select(is_finite(rounded), x - rounded, 0.0f32)
}

//! Functions that drivers compute too inaccurately, and what rounding loses.

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

/// What rounding `x` to `E` loses; 0 beside NaN and infinities, which f16 has for numbers that f32 still holds.
#[cube]
pub(crate) fn rounding_loss<E: Float>(x: f32) -> f32 {
    let rounded = f32::cast_from(E::cast_from(x));
    select(is_finite(rounded), x - rounded, 0.0f32)
}

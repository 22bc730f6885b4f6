//! NaN and infinities, distinguished by their bits: the optimiser folds `x * 0` to 0.

use cubecl::prelude::*;

/// The exponent bits of NaN and infinities, greater than those of any finite number.
pub(crate) const NO_NUMBER: u32 = 0x7f80_0000;

#[cube]
pub(crate) fn exponent_bits(x: f32) -> u32 {
    u32::reinterpret(x) & NO_NUMBER
}

/// True if `x` is neither NaN nor infinite.
#[cube]
pub(crate) fn is_finite(x: f32) -> bool {
    exponent_bits(x) != NO_NUMBER
}

/// −∞, made from its bits like [`infinity`]: CubeCL prints the constant as `-Inf`, for which WGSL has no name.
#[cube]
pub(crate) fn negative_infinity() -> f32 {
    f32::reinterpret(u32::new(comptime!(0xff80_0000i64)))
}

/// +∞.
#[cube]
pub(crate) fn infinity() -> f32 {
    f32::reinterpret(u32::new(comptime!(0x7f80_0000i64)))
}

//! NaN and infinities, told apart by their bits: the optimiser takes `x * 0` for 0.

use cubecl::prelude::*;

/// Whether `x` is neither NaN nor infinite.
#[cube]
pub(crate) fn is_finite(x: f32) -> bool {
    let exponent = comptime!(0x7f80_0000u32);
    u32::reinterpret(x) & exponent != exponent
}

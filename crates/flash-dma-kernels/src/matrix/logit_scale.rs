//! From products to logits, and from logits to probabilities.

use crate::args::Scaling;
use crate::math::{TANH_SERIES_BELOW, softplus_of, tanh_near_zero};
use crate::matrix::ptx::{ex2, reciprocal};
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
        ex2(self.exponent(product, score, scaled, capped, scored))
    }

    /// `log2` of [`weight`](Self::weight).
    pub(crate) fn exponent(
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
        exponent
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

/// `1 / (1 + 2^-x)` by two special-function instructions; NaN stays NaN.
#[cube]
pub(crate) fn sigmoid_of_power(x: f32) -> f32 {
    reciprocal(1.0f32 + ex2(-x))
}

/// `softplus(x)` by two special-function instructions; NaN stays NaN.
#[cube]
pub(crate) fn softplus(x: f32) -> f32 {
    let e = ex2(x.abs() * comptime!(-core::f32::consts::LOG2_E));
    softplus_of(x, e * reciprocal(2.0f32 + e))
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
pub(crate) fn tanh(x: f32) -> f32 {
    let e = ex2(x * comptime!(2.0 * core::f32::consts::LOG2_E));
    let far = fma(-2.0f32, reciprocal(1.0f32 + e), 1.0f32);
    let square = x * x;
    let near = tanh_near_zero(x, square);
    select(square < TANH_SERIES_BELOW, near, far)
}

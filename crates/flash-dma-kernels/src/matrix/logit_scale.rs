//! From products to logits, and from logits to probabilities.

use crate::args::Scaling;
use crate::math::{TANH_SERIES_BELOW, softplus_of, tanh_near_zero};
use crate::matrix::ptx::{at_most_zero, ex2, reciprocal};
use cubecl::prelude::*;

/// The greatest magnitude of a reference from which [`exp_of`] may subtract it after the factor `log2(e)`: the rounding
/// of that product then moves a probability by 6e-6 at most. A greater one is subtracted first, which is exact for
/// logits near it.
const LARGE: f32 = 128.0;

/// Whether a reference is [`LARGE`]; -inf, the reference of a row without keys, is not.
#[cube]
pub(crate) fn is_large(reference: f32) -> bool {
    reference.abs() > LARGE && reference != f32::new(f32::NEG_INFINITY)
}

/// [`is_large`] of the LSE that a pass scaled for [`exp_of`]; +inf is the scaled LSE of a row without keys.
#[cube]
pub(crate) fn is_large_scaled(scaled: f32) -> bool {
    scaled.abs() > comptime!(LARGE * core::f32::consts::LOG2_E) && scaled != f32::new(f32::INFINITY)
}

/// `-log2(e)` times an LSE, plus `rest`, for [`exp_of`]. Only a row without keys has +inf: where the product of a finite
/// LSE is beyond f32 it is the greatest number, as only [`is_large_scaled`] reads that.
#[cube]
pub(crate) fn scaled_lse(lse: f32, rest: f32) -> f32 {
    let scaled = fma(-lse, comptime!(core::f32::consts::LOG2_E), rest);
    let overflows = scaled == f32::new(f32::INFINITY) && lse != f32::new(f32::NEG_INFINITY);
    select(overflows, f32::new(f32::MAX), scaled)
}

/// The LSE of a row and what its rounding lost, for probabilities whatever the size of the logits.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ExactLse {
    pub lse: f32,
    /// `-log2(e)` times what the rounding lost.
    pub rest: f32,
}

#[cube]
impl ExactLse {
    /// That of the row at index `at`.
    pub(crate) fn read(lse: &[f32], lse_rest: &[f32], at: usize) -> ExactLse {
        ExactLse {
            lse: lse[at],
            rest: -lse_rest[at] * comptime!(core::f32::consts::LOG2_E),
        }
    }

    /// `log2` of the probability of a logit, also of one above the LSE, which no kept key has.
    pub(crate) fn exponent(&self, logit: f32) -> f32 {
        fma(
            logit - self.lse,
            comptime!(core::f32::consts::LOG2_E),
            self.rest,
        )
    }

    /// The probability of a kept key's logit: at most 1, though a logit of 1e9 may be recomputed 64 higher than the
    /// forward pass had it. NaN stays NaN.
    pub(crate) fn probability(&self, logit: f32) -> f32 {
        ex2(at_most_zero(self.exponent(logit)))
    }
}

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

    /// `exp(logit - reference)` of a product and a score, `scaled` as in [`exp_of`], of a reference that is not large;
    /// without a score in one multiply-add less.
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

/// `exp(x - reference)` by one multiply-add and one special-function instruction; `scaled` is `-log2(e) * reference`, of
/// a reference that is not [`LARGE`].
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

/// The factor that rescales sums of `exp(x - old)` to the reference `new`, which is not less than `old`; 1 where both
/// are infinite.
#[cube]
pub(crate) fn rescale_to(old: f32, new: f32) -> f32 {
    let factor = ex2((old - new) * comptime!(core::f32::consts::LOG2_E));
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

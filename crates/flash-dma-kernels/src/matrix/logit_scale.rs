//! From products to logits, and from logits to probabilities.

use crate::args::Scaling;
use crate::math::{TANH_SERIES_BELOW, softplus_of, tanh_near_zero};
use crate::matrix::ptx::{at_most_zero, ex2, reciprocal};
use core::f32::consts::{LN_2, LOG2_E};
use cubecl::prelude::*;

/// The greatest magnitude of an LSE that [`exp_of`] may subtract after the factor `log2(e)`: the rounding of that product
/// then moves a probability by 6e-6 at most. A greater one is subtracted first, which is exact for logits near it.
const LARGE: f32 = 128.0;

/// The treatment that the pairs of a tile of queries and a tile of keys need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairKind {
    /// Every row sees every key, and no LSE is large.
    Full,
    /// Like `Full`, and the rank of every key learns from every row; only in the dk/dv kernel.
    Learning,
    /// Some row may not see some key.
    Boundary,
    /// Like `Boundary`, and some LSE is large.
    Large,
}

impl PairKind {
    /// True if every row sees every key.
    pub(crate) fn is_full(self) -> bool {
        matches!(self, Self::Full | Self::Learning)
    }
}

/// True if an LSE exceeds [`LARGE`]; -inf, the LSE of a row without keys, does not.
#[cube]
pub(crate) fn is_large(lse: f32) -> bool {
    lse.abs() > LARGE && lse != f32::new(f32::NEG_INFINITY)
}

/// True if an LSE is large or is that of a row without keys.
#[cube]
pub(crate) fn is_unusual(lse: f32) -> bool {
    lse.abs() > LARGE
}

/// `-log2(e)` times an LSE, plus `rest`, for [`exp_of`]: +inf for a row without keys, and -inf for one whose LSE is
/// large, which needs [`ExactLse`]. Neither is finite, so one test finds the rows that need care.
#[cube]
pub(crate) fn scaled_lse(lse: f32, rest: f32) -> f32 {
    let scaled = fma(-lse, comptime!(LOG2_E), rest);
    select(is_large(lse), f32::new(f32::NEG_INFINITY), scaled)
}

/// [`is_large`] for an LSE after [`scaled_lse`].
#[cube]
pub(crate) fn is_large_scaled(scaled: f32) -> bool {
    scaled == f32::new(f32::NEG_INFINITY)
}

/// The magnitude of the greatest logit up to which a [`Reference`] is made by one product.
const NEAR: f32 = 4_194_304.0;

/// The number from which the logits of a row are measured, near its greatest logit so far: any number serves, if all of
/// its keys and its LSE are measured from it. A logit `x` is `(x - base) * log2(e) + scaled` powers of two above it.
///
/// Up to a magnitude of [`NEAR`] the base is zero, and the reference is the number that the rounded `scaled` stands
/// for: within 0.2 of the greatest logit. A greater one is itself the base, which is exact for logits near it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Reference {
    pub base: f32,
    pub scaled: f32,
}

#[cube]
impl Reference {
    /// The reference for a greatest logit; if that is -inf (no logit), any reference serves.
    pub(crate) fn of(greatest: f32) -> Reference {
        let far = is_far(greatest);
        let none = greatest == f32::new(f32::NEG_INFINITY);
        Reference {
            base: select(far && !none, greatest, 0.0f32),
            scaled: select(far, 0.0f32, -greatest * comptime!(LOG2_E)),
        }
    }

    /// The reference minus the greatest logit from which it was made.
    pub(crate) fn above(&self, greatest: f32) -> f32 {
        let log2 = fma(greatest - self.base, comptime!(LOG2_E), self.scaled);
        select(is_far(greatest), 0.0f32, -log2 * comptime!(LN_2))
    }
}

/// True if the [`Reference`] of a greatest logit has a base, or if there is no logit yet (-inf).
#[cube]
pub(crate) fn is_far(greatest: f32) -> bool {
    greatest.abs() > NEAR
}

/// The factor that turns sums measured from the [`Reference`] of the greatest logit `old` into sums measured from that
/// of `new`, which is not less; 1 if there was no logit before.
#[cube]
pub(crate) fn rescale_reference(old: f32, new: f32) -> f32 {
    let (from, to) = (Reference::of(old), Reference::of(new));
    let power = fma(
        from.base - to.base,
        comptime!(LOG2_E),
        to.scaled - from.scaled,
    );
    let same = old == new || old == f32::new(f32::NEG_INFINITY);
    select(same, 1.0f32, ex2(power))
}

/// The LSE of a row and its rounding error, for probabilities of logits of any size.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ExactLse {
    pub lse: f32,
    /// `-log2(e)` times the rounding error.
    pub rest: f32,
}

#[cube]
impl ExactLse {
    pub(crate) fn read(lse: &[f32], lse_rest: &[f32], at: usize) -> ExactLse {
        ExactLse {
            lse: lse[at],
            rest: -lse_rest[at] * comptime!(LOG2_E),
        }
    }

    /// `log2` of the probability of a logit, also of one above the LSE, which no kept key has.
    pub(crate) fn exponent(&self, logit: f32) -> f32 {
        fma(logit - self.lse, comptime!(LOG2_E), self.rest)
    }

    /// The probability of a kept key's logit: at most 1, though a logit of 1e9 may be recomputed 64 higher than the
    /// forward pass had it. NaN stays NaN.
    pub(crate) fn probability(&self, logit: f32) -> f32 {
        ex2(at_most_zero(self.exponent(logit)))
    }
}

/// The logits of a kernel's products.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LogitScale {
    /// Factor of the product: `scale`; with a softcap `c`, `scale / c`.
    inner: f32,
    /// With a softcap: `c`, and `1 / c`.
    outer: f32,
    inverse: f32,
    #[cube(comptime)]
    form: LogitForm,
}

/// The form of the logits that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogitForm {
    /// True if the scaled product is capped.
    pub capped: bool,
    /// True if something is added to it: a score, a bias or ALiBi.
    pub scored: bool,
}

#[cube]
impl LogitScale {
    pub(crate) fn new(scaling: &Scaling, #[comptime] form: LogitForm) -> LogitScale {
        let mut inner = scaling.scale;
        let mut inverse = 1.0f32;
        if comptime!(form.capped) {
            inner = scaling.scale / scaling.softcap;
            inverse = 1.0f32 / scaling.softcap;
        }
        LogitScale {
            inner,
            outer: scaling.softcap,
            inverse,
            form,
        }
    }

    /// The same, for a struct to own.
    pub(crate) fn copied(&self) -> LogitScale {
        LogitScale {
            inner: self.inner,
            outer: self.outer,
            inverse: self.inverse,
            form: self.form,
        }
    }

    /// The logit of a product and a score, natural units.
    pub(crate) fn apply(&self, product: f32, score: f32) -> f32 {
        if comptime!(self.form.capped) {
            fma(self.outer, tanh(product * self.inner), score)
        } else {
            fma(product, self.inner, score)
        }
    }

    /// `exp(logit - reference)` of a product and a score, with `scaled` as in [`exp_of`] and a reference that is not
    /// large; one multiply-add less without a score.
    pub(crate) fn weight(&self, product: f32, score: f32, scaled: f32) -> f32 {
        ex2(self.exponent(product, score, scaled))
    }

    /// `log2` of [`weight`](Self::weight).
    pub(crate) fn exponent(&self, product: f32, score: f32, scaled: f32) -> f32 {
        let mut exponent = fma(product, self.inner * comptime!(LOG2_E), scaled);
        if comptime!(self.form.capped || self.form.scored) {
            let x = self.apply(product, score);
            exponent = fma(x, comptime!(LOG2_E), scaled);
        }
        exponent
    }

    /// The derivative of the logit by `scale * product`, from the logit without its score.
    pub(crate) fn slope(&self, logit: f32) -> f32 {
        let mut slope = 1.0f32;
        if comptime!(self.form.capped) {
            let t = logit * self.inverse;
            slope = fma(-t, t, 1.0f32);
        }
        slope
    }
}

/// `exp(x - reference)` by one multiply-add and one special-function instruction; `scaled` is `-log2(e) * reference`,
/// where the reference is not [`LARGE`].
#[cube]
pub(crate) fn exp_of(x: f32, scaled: f32) -> f32 {
    ex2(fma(x, comptime!(LOG2_E), scaled))
}

/// `1 / (1 + 2^-x)` by two special-function instructions; NaN stays NaN.
#[cube]
pub(crate) fn sigmoid_of_power(x: f32) -> f32 {
    reciprocal(1.0f32 + ex2(-x))
}

/// `softplus(x)` by two special-function instructions; NaN stays NaN.
#[cube]
pub(crate) fn softplus(x: f32) -> f32 {
    let e = ex2(x.abs() * comptime!(-LOG2_E));
    softplus_of(x, e * reciprocal(2.0f32 + e))
}

/// The factor that rescales sums of `exp(x - old)` to `new`, not less than `old`; 1 where both are infinite.
#[cube]
pub(crate) fn rescale_to(old: f32, new: f32) -> f32 {
    let factor = ex2((old - new) * comptime!(LOG2_E));
    select(old == new, 1.0f32, factor)
}

/// `tanh(x) = 1 - 2 / (1 + e^(2x))` by the special-function unit, whose absolute error is a few 1e-7; near 0, where
/// most capped logits lie and that error would be a large part of them, by the series. The `tanh.approx` instruction's
/// error, 5e-4, would show in the logits.
#[cube]
pub(crate) fn tanh(x: f32) -> f32 {
    let e = ex2(x * comptime!(2.0 * LOG2_E));
    let far = fma(-2.0f32, reciprocal(1.0f32 + e), 1.0f32);
    let square = x * x;
    let near = tanh_near_zero(x, square);
    select(square < TANH_SERIES_BELOW, near, far)
}

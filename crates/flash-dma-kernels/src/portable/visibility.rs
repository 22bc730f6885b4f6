//! The pairs of a tile of queries and a tile of keys that attend, and their logits.

use crate::finite::negative_infinity;
use crate::math::{TANH_SERIES_BELOW, tanh_near_zero};
use crate::portable::blueprint::Blueprint;
use cubecl::prelude::*;

/// The pairs of outer and inner rows that attend, and the biases of their logits.
#[cube]
pub trait Visibility {
    /// True if the query of the pair attends to its key.
    fn selected(&self, outer: usize, inner: usize) -> bool;

    /// The logit of a selected pair with its bias.
    fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32;

    /// Applies dropout to a value of a pair: multiplies it by the factor of the pair's probability.
    fn dropped(&self, value: f32, outer: usize, inner: usize) -> f32;
}

/// The query and the key of a pair; the keys are the outer rows if `keys_outer`.
#[cube]
pub(crate) fn query_and_key(
    outer: usize,
    inner: usize,
    #[comptime] keys_outer: bool,
) -> (usize, usize) {
    let (mut query, mut key) = (outer, inner);
    if comptime!(keys_outer) {
        query = inner;
        key = outer;
    }
    (query, key)
}

/// True if a row attends to nothing, by its LSE, if given: it has no gradients, whatever its logits.
#[cube]
pub(crate) fn is_blind(lse: ComptimeOption<&Shared<[f32]>>, row: usize) -> bool {
    #[comptime]
    match lse {
        // Tested by `==`, which behaves the same on every runtime if the LSE is NaN.
        ComptimeOption::Some(lse) => lse[row] == negative_infinity(),
        ComptimeOption::None => false,
    }
}

/// The scaled and optionally capped product of a query and a key.
#[cube]
pub fn logit(product: f32, scale: f32, softcap: f32, #[comptime] bp: Blueprint) -> f32 {
    let mut x = product * scale;
    if comptime!(bp.softcap) {
        let t = x / softcap;
        let square = t * t;
        // A driver's `tanh` may have an absolute error, as Mesa's CPU driver's has.
        let near = tanh_near_zero(t, square);
        x = softcap * select(square < TANH_SERIES_BELOW, near, t.tanh());
    }
    x
}

/// The derivative of [`logit`] by `product`, from its value.
#[cube]
pub(crate) fn logit_slope(logit: f32, scale: f32, softcap: f32, #[comptime] bp: Blueprint) -> f32 {
    let mut slope = scale;
    if comptime!(bp.softcap) {
        let t = logit / softcap;
        slope = scale * (1.0f32 - t * t);
    }
    slope
}

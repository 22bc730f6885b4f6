//! Online softmax: probabilities of one key tile after the other, against a reference that seldom moves.

use crate::dropout::DropoutArg;
use crate::math::{log_sum_rest, rounding_loss};
use crate::matrix::dropout::{LaneMask, kept, kept_by_product, pair_mask};
use crate::matrix::fragment::{Accumulators, pack, quad_max, quad_sum, set};
use crate::matrix::logit_scale::{exp_of, is_large, rescale_to};
use crate::matrix::ptx::any_lane;
use crate::matrix::query_tile::OutputRows;
use crate::matrix::wgmma::rows::RowToWrite;
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// How far the maximum of a row may rise above the reference of its probabilities before the row is
/// rescaled: `e^5.5` is 245, far from any overflow, and most tiles need no rescaling.
const SLACK: f32 = 5.5;

/// Columns of an accumulator: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    pub first: usize,
    pub count: usize,
}

impl Columns {
    /// The first `count`.
    pub(crate) fn first(count: usize) -> Self {
        Self { first: 0, count }
    }
}

/// A number for each of the two rows of which a lane holds elements in an accumulator.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PerRow {
    pub upper: f32,
    pub lower: f32,
}

#[cube]
impl PerRow {
    /// Raises the numbers to those of a logit of each row.
    pub(crate) fn raise(&mut self, upper: f32, lower: f32) {
        self.upper = max(self.upper, upper);
        self.lower = max(self.lower, lower);
    }

    /// Raises the numbers to the greatest logits of an accumulator of `columns` columns, see
    /// [`tile_logits`](crate::matrix::logits::tile_logits).
    pub(crate) fn raise_to<N: Size>(
        &mut self,
        logits: &Vector<f32, N>,
        #[comptime] columns: usize,
    ) {
        #[unroll]
        for n in 0..comptime!(columns / 8) {
            #[unroll]
            for e in 0..2usize {
                let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
                self.upper = max(self.upper, logits.extract(at0));
                self.lower = max(self.lower, logits.extract(at1));
            }
        }
    }
}

/// The softmax of the two rows of a lane over the key tiles so far. A row lies in the four lanes of a quad: they share
/// the reference, and each sums the probabilities that it computes.
///
/// A key tile takes these turns: [`maxima`](Self::maxima), raised to its logits; if they are
/// [`outgrown`](Self::outgrown), the accumulators times the factors of [`rescale`](Self::rescale); the logits
/// [rebased](Self::rebased); the probabilities against the [`references`](Self::references), and if `exact` a
/// [note](Self::note_tops) of the maxima.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct OnlineSoftmax {
    /// The references of the probabilities; -inf before the first key.
    max0: f32,
    max1: f32,
    /// The sums of the probabilities.
    sum0: f32,
    sum1: f32,
    /// Whether a reference of the warp's rows is large: it is then subtracted from the logits before their
    /// exponentials.
    large: bool,
    /// The greatest logits, and what the rounding of their probabilities loses, relative to the references; if `exact`.
    top0: f32,
    top1: f32,
    lost0: f32,
    lost1: f32,
    /// Whether the sums shall have the greatest probabilities as they were rounded, see [`finish`](Self::finish).
    #[cube(comptime)]
    exact: bool,
}

#[cube]
impl OnlineSoftmax {
    /// Before the first key; `exact` as in [`finish`](Self::finish).
    pub(crate) fn new(#[comptime] exact: bool) -> OnlineSoftmax {
        OnlineSoftmax {
            max0: f32::new(f32::NEG_INFINITY),
            max1: f32::new(f32::NEG_INFINITY),
            sum0: 0.0f32,
            sum1: 0.0f32,
            large: false,
            top0: f32::new(f32::NEG_INFINITY),
            top1: f32::new(f32::NEG_INFINITY),
            lost0: 0.0f32,
            lost1: 0.0f32,
            exact,
        }
    }

    /// The maxima so far, as far as they matter: the logits of the next tile are to raise them.
    pub(crate) fn maxima(&self) -> PerRow {
        let mut maxima = PerRow {
            upper: self.max0,
            lower: self.max1,
        };
        if comptime!(self.exact) {
            maxima.upper = self.top0;
            maxima.lower = self.top1;
        }
        maxima
    }

    /// Shares the maxima of a tile among the lanes of a row, and returns whether those of any row of the warp rose so
    /// far that all its rows are to be rescaled.
    pub(crate) fn outgrown(&self, maxima: &mut PerRow) -> bool {
        maxima.upper = quad_max(maxima.upper);
        maxima.lower = quad_max(maxima.lower);
        any_lane(maxima.upper > self.max0 + SLACK || maxima.lower > self.max1 + SLACK)
    }

    /// Notes the maxima of a tile whose probabilities are computed against `references`, and what rounding these to `E`
    /// loses, if `exact`.
    pub(crate) fn note_tops<E: Float>(&mut self, maxima: &PerRow, references: &PerRow) {
        if comptime!(self.exact) {
            let (higher0, higher1) = (maxima.upper > self.top0, maxima.lower > self.top1);
            if any_lane(higher0 || higher1) {
                let bases = self.bases();
                let p0 = exp_of(maxima.upper - bases.upper, references.upper);
                let p1 = exp_of(maxima.lower - bases.lower, references.lower);
                self.lost0 = select(higher0, rounding_loss::<E>(p0), self.lost0);
                self.lost1 = select(higher1, rounding_loss::<E>(p1), self.lost1);
                self.top0 = maxima.upper;
                self.top1 = maxima.lower;
            }
        }
    }

    /// Makes the maxima of a tile the references, and returns the factors of the accumulators. A row that has seen no
    /// key yet rescales zeros, by any finite factor.
    pub(crate) fn rescale(&mut self, maxima: &PerRow) -> PerRow {
        let upper = rescale_to(self.max0, maxima.upper);
        let lower = rescale_to(self.max1, maxima.lower);
        self.max0 = maxima.upper;
        self.max1 = maxima.lower;
        self.sum0 *= upper;
        self.sum1 *= lower;
        if comptime!(self.exact) {
            self.lost0 *= upper;
            self.lost1 *= lower;
        }
        self.large = any_lane(is_large(self.max0) || is_large(self.max1));
        PerRow { upper, lower }
    }

    /// What [`exp_of`] subtracts from the rebased logits. A row that has seen no key yet: against any finite reference
    /// its probabilities are 0.
    pub(crate) fn references(&self) -> PerRow {
        let none = f32::new(f32::NEG_INFINITY);
        let log2e = comptime!(core::f32::consts::LOG2_E);
        PerRow {
            upper: select(self.large || self.max0 == none, 0.0f32, -self.max0 * log2e),
            lower: select(self.large || self.max1 == none, 0.0f32, -self.max1 * log2e),
        }
    }

    /// What is subtracted from the logits before their exponentials: nothing, unless a reference is large.
    fn bases(&self) -> PerRow {
        let none = f32::new(f32::NEG_INFINITY);
        PerRow {
            upper: select(self.large && self.max0 != none, self.max0, 0.0f32),
            lower: select(self.large && self.max1 != none, self.max1, 0.0f32),
        }
    }

    /// The logits of an accumulator of `columns` columns, minus large references.
    pub(crate) fn rebased<N: Size>(
        &self,
        logits: Vector<f32, N>,
        #[comptime] columns: usize,
    ) -> Vector<f32, N> {
        let mut rebased = logits;
        if self.large {
            let bases = self.bases();
            #[unroll]
            for n in 0..comptime!(columns / 8) {
                #[unroll]
                for e in 0..2usize {
                    let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
                    rebased.insert(at0, rebased.extract(at0) - bases.upper);
                    rebased.insert(at1, rebased.extract(at1) - bases.lower);
                }
            }
        }
        rebased
    }

    /// [`rebased`](Self::rebased) for the compiler's own products.
    pub(crate) fn rebase<NC: Size>(
        &self,
        logits: &mut Accumulators<NC>,
        #[comptime] columns: usize,
    ) {
        if self.large {
            let bases = self.bases();
            #[unroll]
            for n in 0..comptime!(columns / 8) {
                let (upper, lower) = (logits[n][0], logits[n][1]);
                set(&mut logits[n], 0usize, upper - Vector::new(bases.upper));
                set(&mut logits[n], 1usize, lower - Vector::new(bases.lower));
            }
        }
    }

    /// Adds the probabilities of some columns of the rebased logits of key tile `tile`, and returns them rounded, as an
    /// A operand, without those that `mask` drops; `words` are those of all stages' keys. The sums have no dropout.
    pub(crate) fn probabilities<N: Size, NP: Size>(
        &mut self,
        logits: &Vector<f32, N>,
        references: &PerRow,
        mask: &ComptimeOption<LaneMask>,
        words: &ComptimeOption<Shared<[u32]>>,
        tile: usize,
        #[comptime] columns: Columns,
        #[comptime] element: ElementType,
    ) -> Vector<u32, NP> {
        let mut packed = Vector::<u32, NP>::new(0u32);
        #[unroll]
        for n in 0..comptime!(columns.count / 8) {
            let at = comptime!(columns.first / 2 + n * 4);
            let a = exp_of(logits.extract(at), references.upper);
            let b = exp_of(logits.extract(comptime!(at + 1)), references.upper);
            let c = exp_of(logits.extract(comptime!(at + 2)), references.lower);
            let d = exp_of(logits.extract(comptime!(at + 3)), references.lower);
            self.sum0 += a + b;
            self.sum1 += c + d;
            let mask = pair_mask(mask, words, tile, 0usize, comptime!(columns.first + n * 8));
            let a = kept_by_product(&mask, a, 0usize, false);
            let b = kept_by_product(&mask, b, 1usize, false);
            packed.insert(comptime!(n * 2), pack(a, b, element));
            let c = kept_by_product(&mask, c, 0usize, true);
            let d = kept_by_product(&mask, d, 1usize, true);
            packed.insert(comptime!(n * 2 + 1), pack(c, d, element));
        }
        packed
    }

    /// [`probabilities`](Self::probabilities) of the `n`-th sixteen columns, whose logits are two accumulators, as a
    /// fragment of the compiler's own products.
    pub(crate) fn fragment<E: Float, NA: Size, NC: Size>(
        &mut self,
        logits: &Accumulators<NC>,
        references: &PerRow,
        mask: &ComptimeOption<LaneMask>,
        words: &ComptimeOption<Shared<[u32]>>,
        tile: usize,
        #[comptime] n: usize,
    ) -> Array<Vector<E, NA>> {
        let first = comptime!(2 * n);
        let mut p = Array::<Vector<E, NA>>::new(4usize);
        #[unroll]
        for half in 0..2usize {
            let mut upper = logits[comptime!(first + half)][0];
            let mut lower = logits[comptime!(first + half)][1];
            let mask = pair_mask(mask, words, tile, 0usize, comptime!((first + half) * 8));
            #[unroll]
            for e in 0..2usize {
                let p0 = exp_of(upper.extract(e), references.upper);
                let p1 = exp_of(lower.extract(e), references.lower);
                self.sum0 += p0;
                self.sum1 += p1;
                upper.insert(e, kept(&mask, p0, e, false));
                lower.insert(e, kept(&mask, p1, e, true));
            }
            p[comptime!(half * 2)] = Vector::cast_from(upper);
            p[comptime!(half * 2 + 1)] = Vector::cast_from(lower);
        }
        p
    }

    /// The sums over all keys and all lanes of a row. If `exact`, the sum that divides the output has the greatest
    /// probability as the product with V rounded it. A key that has nearly all the weight of its row then has
    /// the same weight in the output and in the sum, so that its output is exact; the rounding of smaller probabilities
    /// moves the output by no more than it moves the gradients of those probabilities. If dropout takes that key, the
    /// rest of the output has an error of at most half a unit in its last place for it.
    pub(crate) fn finish(&mut self) -> SoftmaxSums {
        self.sum0 = quad_sum(self.sum0);
        self.sum1 = quad_sum(self.sum1);
        let (mut rounded0, mut rounded1) = (self.sum0, self.sum1);
        if comptime!(self.exact) {
            rounded0 -= self.lost0;
            rounded1 -= self.lost1;
        }
        SoftmaxSums {
            upper: RowSum {
                reference: self.max0,
                sum: self.sum0,
                rounded: rounded0,
                empty: self.sum0 == 0.0f32,
            },
            lower: RowSum {
                reference: self.max1,
                sum: self.sum1,
                rounded: rounded1,
                empty: self.sum1 == 0.0f32,
            },
        }
    }
}

/// The sum of the probabilities of a row over all its keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowSum {
    reference: f32,
    sum: f32,
    /// The sum that divides the output, see [`OnlineSoftmax::finish`].
    rounded: f32,
    /// No key at all, or none with a logit above -inf: the output is zero and the LSE -inf. NaN stays NaN.
    pub empty: bool,
}

#[cube]
impl RowSum {
    /// The factor of the row's output, unless it is empty.
    pub(crate) fn inverse(&self) -> f32 {
        1.0f32 / self.rounded
    }

    /// How its output is written to row `row`, if there is such a row.
    pub(crate) fn row_to_write(&self, row: usize, valid: bool) -> RowToWrite {
        RowToWrite {
            valid,
            row,
            factor: self.inverse(),
            empty: self.empty,
        }
    }

    /// The row's LSE.
    pub(crate) fn lse(&self) -> f32 {
        let none = f32::new(f32::NEG_INFINITY);
        select(self.empty, none, self.reference + self.sum.ln())
    }

    /// What the rounding of the LSE lost.
    pub(crate) fn lse_rest(&self) -> f32 {
        log_sum_rest(self.reference, self.sum.ln(), self.lse())
    }
}

/// The sums of the two rows of a lane.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SoftmaxSums {
    pub upper: RowSum,
    pub lower: RowSum,
}

#[cube]
impl SoftmaxSums {
    /// Gives the outputs the factor of the probabilities that dropout has left, if there is any.
    pub(crate) fn with_dropout(&mut self, dropout: &DropoutArg) {
        #[comptime]
        match dropout {
            ComptimeOption::Some(seed) => {
                self.upper.rounded /= seed.factor;
                self.lower.rounded /= seed.factor;
            }
            ComptimeOption::None => {}
        }
    }

    /// Writes the LSE of the rows: one lane of each quad does.
    pub(crate) fn write_lse(&self, to: &OutputRows, lse: &mut [f32]) {
        let quad = UNIT_POS_X as usize % 4;
        if quad == 0 {
            if to.has_upper {
                lse[to.upper] = self.upper.lse();
            }
            if to.has_lower {
                lse[to.lower] = self.lower.lse();
            }
        }
    }

    /// Writes what the rounding of the LSEs lost, as [`write_lse`](Self::write_lse) writes these.
    pub(crate) fn write_lse_rest(&self, to: &OutputRows, rest: &mut [f32]) {
        let quad = UNIT_POS_X as usize % 4;
        if quad == 0 {
            if to.has_upper {
                rest[to.upper] = self.upper.lse_rest();
            }
            if to.has_lower {
                rest[to.lower] = self.lower.lse_rest();
            }
        }
    }
}

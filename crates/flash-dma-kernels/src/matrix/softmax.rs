//! Online softmax: probabilities of one key tile after another, against a reference that rarely moves.

use crate::dropout::DropoutArg;
use crate::math::{log_sum_rest, rounding_loss};
use crate::matrix::dropout::{LaneMask, kept, kept_by_product, pair_mask};
use crate::matrix::fragment::{Accumulators, pack, quad_max, quad_sum, set};
use crate::matrix::logit_scale::{Reference, exp_of, is_far, rescale_reference};
use crate::matrix::ptx::{any_lane, ex2};
use crate::matrix::rows::OutputRows;
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
    pub(crate) fn first(count: usize) -> Self {
        Self { first: 0, count }
    }
}

/// A number for each of the two rows whose elements a lane holds in an accumulator.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PerRow {
    pub upper: f32,
    pub lower: f32,
}

#[cube]
impl PerRow {
    /// The same number for both rows.
    pub(crate) fn both(x: f32) -> PerRow {
        PerRow { upper: x, lower: x }
    }

    pub(crate) fn set(&mut self, to: &PerRow) {
        self.upper = to.upper;
        self.lower = to.lower;
    }

    /// Raises the numbers to a logit of each row.
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
/// [`outgrown`](Self::outgrown), the accumulators times the factors of [`rescale`](Self::rescale) and the logits
/// [rebased](Self::rebase); the probabilities against the [`references`](Self::references), and if `exact` a
/// [note](Self::note_tops) of the maxima.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct OnlineSoftmax {
    /// The logits from whose [`Reference`]s the probabilities are measured; -inf before the first key.
    max0: f32,
    max1: f32,
    /// Made from them, for every tile: the limits of [`slack_above`], and the numbers that [`exp_of`] subtracts.
    limit0: f32,
    limit1: f32,
    scaled0: f32,
    scaled1: f32,
    /// The sums of the probabilities.
    sum0: f32,
    sum1: f32,
    /// The greatest logits, and the numbers that [`exp_of`] subtracted from them; if `exact`.
    top0: f32,
    top1: f32,
    from0: f32,
    from1: f32,
    /// True if the sums include the greatest probabilities as rounded, see [`finish`](Self::finish).
    #[cube(comptime)]
    exact: bool,
}

#[cube]
impl OnlineSoftmax {
    /// The state before the first key; `exact` as in [`finish`](Self::finish).
    pub(crate) fn new(#[comptime] exact: bool) -> OnlineSoftmax {
        OnlineSoftmax {
            max0: f32::new(f32::NEG_INFINITY),
            max1: f32::new(f32::NEG_INFINITY),
            limit0: f32::new(f32::NEG_INFINITY),
            limit1: f32::new(f32::NEG_INFINITY),
            scaled0: 0.0f32,
            scaled1: 0.0f32,
            sum0: 0.0f32,
            sum1: 0.0f32,
            top0: f32::new(f32::NEG_INFINITY),
            top1: f32::new(f32::NEG_INFINITY),
            from0: 0.0f32,
            from1: 0.0f32,
            exact,
        }
    }

    /// The maxima so far, as far as they matter, for the logits of the next tile to raise.
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

    /// Shares the maxima of a tile among the lanes of a row, and returns true if all rows of the warp must be rescaled:
    /// those of one rose far, or a reference has a base, which only the rescaling path subtracts. Logits so large are
    /// rare, and the path of all others has neither a branch nor a register for them.
    pub(crate) fn outgrown(&self, maxima: &mut PerRow) -> bool {
        maxima.upper = quad_max(maxima.upper);
        maxima.lower = quad_max(maxima.lower);
        any_lane(maxima.upper > self.limit0 || maxima.lower > self.limit1)
    }

    /// Notes the maxima of a tile and the numbers from which their probabilities are measured, if `exact`.
    pub(crate) fn note_tops(&mut self, maxima: &PerRow) {
        if comptime!(self.exact) {
            self.from0 = select(maxima.upper > self.top0, self.scaled0, self.from0);
            self.from1 = select(maxima.lower > self.top1, self.scaled1, self.from1);
            self.top0 = maxima.upper;
            self.top1 = maxima.lower;
        }
    }

    /// Measures from the maxima of a tile from now on, and returns the factors of the accumulators. A row that has seen
    /// no key yet rescales zeros, by any finite factor.
    pub(crate) fn rescale(&mut self, maxima: &PerRow) -> PerRow {
        let upper = rescale_reference(self.max0, maxima.upper);
        let lower = rescale_reference(self.max1, maxima.lower);
        self.max0 = maxima.upper;
        self.max1 = maxima.lower;
        self.limit0 = slack_above(maxima.upper);
        self.limit1 = slack_above(maxima.lower);
        self.scaled0 = Reference::of(maxima.upper).scaled;
        self.scaled1 = Reference::of(maxima.lower).scaled;
        self.sum0 *= upper;
        self.sum1 *= lower;
        PerRow { upper, lower }
    }

    /// The numbers that [`exp_of`] subtracts from the rebased logits. A row that has seen no key yet has probabilities
    /// of 0 against any finite reference.
    pub(crate) fn references(&self) -> PerRow {
        PerRow {
            upper: self.scaled0,
            lower: self.scaled1,
        }
    }

    /// Subtracts the bases of the references from the logits of an accumulator of `columns` columns, if there are any.
    pub(crate) fn rebase<N: Size>(&self, logits: &mut Vector<f32, N>, #[comptime] columns: usize) {
        if self.has_bases() {
            let bases = self.bases();
            #[unroll]
            for n in 0..comptime!(columns / 8) {
                #[unroll]
                for e in 0..2usize {
                    let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
                    logits.insert(at0, logits.extract(at0) - bases.upper);
                    logits.insert(at1, logits.extract(at1) - bases.lower);
                }
            }
        }
    }

    /// [`rebase`](Self::rebase) for the compiler's own products.
    pub(crate) fn rebase_each<NC: Size>(
        &self,
        logits: &mut Accumulators<NC>,
        #[comptime] columns: usize,
    ) {
        if self.has_bases() {
            let bases = self.bases();
            #[unroll]
            for n in 0..comptime!(columns / 8) {
                let (upper, lower) = (logits[n][0], logits[n][1]);
                set(&mut logits[n], 0usize, upper - Vector::new(bases.upper));
                set(&mut logits[n], 1usize, lower - Vector::new(bases.lower));
            }
        }
    }

    fn bases(&self) -> PerRow {
        PerRow {
            upper: Reference::of(self.max0).base,
            lower: Reference::of(self.max1).base,
        }
    }

    /// True if a row of the warp has a base.
    fn has_bases(&self) -> bool {
        let bases = self.bases();
        any_lane(bases.upper != 0.0f32 || bases.lower != 0.0f32)
    }

    /// The probabilities of some columns of rebased logits, for [`packed`]; added to the sums, which have no dropout.
    pub(crate) fn exponentials<N: Size>(
        &mut self,
        logits: &Vector<f32, N>,
        references: &PerRow,
        #[comptime] columns: Columns,
    ) -> Vector<f32, N> {
        let mut all = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for n in 0..comptime!(columns.count / 8) {
            let at = comptime!(columns.first / 2 + n * 4);
            let a = exp_of(logits.extract(at), references.upper);
            let b = exp_of(logits.extract(comptime!(at + 1)), references.upper);
            let c = exp_of(logits.extract(comptime!(at + 2)), references.lower);
            let d = exp_of(logits.extract(comptime!(at + 3)), references.lower);
            self.sum0 += a + b;
            self.sum1 += c + d;
            all.insert(at, a);
            all.insert(comptime!(at + 1), b);
            all.insert(comptime!(at + 2), c);
            all.insert(comptime!(at + 3), d);
        }
        all
    }

    /// [`exponentials`](Self::exponentials) of the `n`-th sixteen columns, without those that `mask` drops, as a fragment of the compiler's products.
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

    /// The sums over all keys and all lanes of a row. If `exact`, the sum that divides the output includes the greatest
    /// probability as the product with V rounded it to `E`. A key that has nearly all the weight of its row then has
    /// the same weight in the output and in the sum, so that its output is exact; the rounding of smaller probabilities
    /// moves the output by no more than it moves the gradients of those probabilities. If dropout takes that key, the
    /// rest of the output has an error of at most half a unit in its last place for it.
    pub(crate) fn finish<E: Float>(&mut self) -> SoftmaxSums {
        self.sum0 = quad_sum(self.sum0);
        self.sum1 = quad_sum(self.sum1);
        let (mut rounded0, mut rounded1) = (self.sum0, self.sum1);
        if comptime!(self.exact) {
            let lost0 = lost_by_rounding::<E>(self.top0, self.from0, self.scaled0);
            let lost1 = lost_by_rounding::<E>(self.top1, self.from1, self.scaled1);
            // If the greatest logit has a base, it is its own reference: its probability is 1, which loses nothing.
            rounded0 -= select(is_far(self.max0), 0.0f32, lost0);
            rounded1 -= select(is_far(self.max1), 0.0f32, lost1);
        }
        SoftmaxSums {
            upper: RowSum {
                greatest: self.max0,
                sum: self.sum0,
                rounded: rounded0,
                empty: self.sum0 == 0.0f32,
            },
            lower: RowSum {
                greatest: self.max1,
                sum: self.sum1,
                rounded: rounded1,
                empty: self.sum1 == 0.0f32,
            },
        }
    }
}

/// Some columns of the probabilities of key tile `tile`, rounded, as an A operand, without those that `mask` drops; `words`
/// are those of all stages' keys.
#[cube]
pub(crate) fn packed<N: Size, NP: Size>(
    probabilities: &Vector<f32, N>,
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
        let mask = pair_mask(mask, words, tile, 0usize, comptime!(columns.first + n * 8));
        #[unroll]
        for row in 0..2usize {
            let (first, lower) = comptime!((at + 2 * row, row == 1));
            let a = kept_by_product(&mask, probabilities.extract(first), 0usize, lower);
            let second = probabilities.extract(comptime!(first + 1));
            let b = kept_by_product(&mask, second, 1usize, lower);
            packed.insert(comptime!(n * 2 + row), pack(a, b, element));
        }
    }
    packed
}

/// The greatest number that a row's logits may reach before it is rescaled, given the one from which they are measured;
/// lower than any logit if there is none yet or it has a base.
#[cube]
fn slack_above(greatest: f32) -> f32 {
    let none = f32::new(f32::NEG_INFINITY);
    select(is_far(greatest), none, greatest + SLACK)
}

/// The rounding error to `E` of the probability of logit `x`, from which [`exp_of`] subtracted `scaled`; expressed
/// relative to `now` instead.
#[cube]
fn lost_by_rounding<E: Float>(x: f32, scaled: f32, now: f32) -> f32 {
    rounding_loss::<E>(exp_of(x, scaled)) * ex2(now - scaled)
}

/// The sum of the probabilities of a row over all its keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowSum {
    /// The logit from whose [`Reference`] they are measured.
    greatest: f32,
    sum: f32,
    /// The sum that divides the output, see [`OnlineSoftmax::finish`].
    rounded: f32,
    /// True if no key has a logit above -inf, or there is no key: the output is zero and the LSE -inf. NaN stays NaN.
    pub empty: bool,
}

#[cube]
impl RowSum {
    /// The factor of the row's output, unless it is empty.
    pub(crate) fn inverse(&self) -> f32 {
        1.0f32 / self.rounded
    }

    /// The way its output is written to row `row`, if there is such a row.
    pub(crate) fn row_to_write(&self, row: usize, valid: bool) -> RowToWrite {
        RowToWrite {
            valid,
            row,
            factor: self.inverse(),
            empty: self.empty,
        }
    }

    /// The LSE minus the greatest logit.
    fn log_sum(&self) -> f32 {
        Reference::of(self.greatest).above(self.greatest) + self.sum.ln()
    }

    pub(crate) fn lse(&self) -> f32 {
        let none = f32::new(f32::NEG_INFINITY);
        select(self.empty, none, self.greatest + self.log_sum())
    }

    pub(crate) fn lse_rest(&self) -> f32 {
        log_sum_rest(self.greatest, self.log_sum(), self.lse())
    }
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct SoftmaxSums {
    pub upper: RowSum,
    pub lower: RowSum,
}

#[cube]
impl SoftmaxSums {
    /// Multiplies the outputs by the factor of the probabilities that dropout has left, if there is dropout.
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

    /// Writes the rounding errors of the LSEs, as [`write_lse`](Self::write_lse) writes the LSEs.
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

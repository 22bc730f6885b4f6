//! The loops over a block of logits: online softmax forward, its gradient backward.
//!
//! A block is `[rows, columns]` with `columns` a multiple of [`LANES`]. The columns from `tested` on hold pairs that
//! are not attended to: those are replaced, never multiplied, so nothing a key or a query holds leaks through them.

use super::bias_gradient::LogitGradients;
use super::dropout::BlockMask;
use crate::keys::block::KeyBlock;
use crate::keys::visibility::{Visibility, VisibleLanes, VisiblePairs};
use crate::simd::{LANES, Loop, exp, tanh};

/// One block of the online softmax: turns scaled products into probabilities relative to the running maximum and
/// rescales the results of earlier blocks.
pub(crate) struct SoftmaxBlock<'a> {
    /// `[rows, columns]`: scaled products in, `exp(logit - max)` out, 0 where not attended to; with dropout.
    pub(crate) p: &'a mut [f32],
    pub(crate) block: &'a KeyBlock<'a>,
    pub(crate) softcap: Option<f32>,
    pub(super) dropout: Option<BlockMask<'a>>,
    /// `[rows]`: greatest logit so far, -inf at first.
    pub(crate) max: &'a mut [f32],
    /// `[rows]`: sum of `exp(logit - max)` so far.
    pub(crate) sum: &'a mut [f32],
    /// `[rows, head_dim]`: sum of `exp(logit - max) v` so far.
    pub(crate) acc: &'a mut [f32],
}

impl Loop for SoftmaxBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.block.visible {
            Visibility::Queries(visible) => self.rows::<FUSED, _>(visible),
            Visibility::Bits(visible) => self.rows::<FUSED, _>(visible),
        }
    }
}

impl SoftmaxBlock<'_> {
    #[inline(always)]
    fn rows<const FUSED: bool, V: VisiblePairs>(self, visible: V) {
        let dim = self.acc.len() / self.max.len();
        let tested = self.block.tested / LANES;
        for (r, row) in self.p.chunks_exact_mut(self.block.columns).enumerate() {
            let (row, _) = row.as_chunks_mut::<LANES>();
            let bias = self.block.bias_of(r);
            if let Some(cap) = self.softcap {
                for x in row.as_flattened_mut() {
                    *x = cap * tanh::<FUSED>(*x / cap);
                }
            }
            // A comparison with NaN is false: the maximum ignores NaN, the exponential does not.
            let mut maxima = [f32::NEG_INFINITY; LANES];
            let (inner, edge) = row.split_at_mut(tested);
            for (x, bias) in inner.iter_mut().zip(bias) {
                for t in 0..LANES {
                    x[t] += bias[t];
                    maxima[t] = if x[t] > maxima[t] { x[t] } else { maxima[t] };
                }
            }
            let at = self.block.row(r);
            for (c, (x, bias)) in edge.iter_mut().zip(&bias[tested..]).enumerate() {
                let visible = visible.lanes(at, tested + c);
                for t in 0..LANES {
                    x[t] = if visible.contains(t) {
                        x[t] + bias[t]
                    } else {
                        f32::NEG_INFINITY
                    };
                    maxima[t] = if x[t] > maxima[t] { x[t] } else { maxima[t] };
                }
            }
            let before = self.max[r];
            let max = (maxima.iter()).fold(before, |max, &x| if x > max { x } else { max });
            // With nothing but -inf so far every term is exp(-inf) = 0, not exp(-inf + inf).
            let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
            let mut sums = [0.0f32; LANES];
            for x in row.iter_mut() {
                for t in 0..LANES {
                    x[t] = exp::<FUSED>(x[t] - shift);
                    sums[t] += x[t];
                }
            }
            self.max[r] = max;
            if max != before {
                let rescale = exp::<FUSED>(before - shift);
                self.sum[r] *= rescale;
                for x in &mut self.acc[r * dim..(r + 1) * dim] {
                    *x *= rescale;
                }
            }
            self.sum[r] += sums.iter().sum::<f32>();
            if let Some(dropout) = self.dropout {
                dropout.apply(r, row);
            }
        }
    }
}

/// The LSE of rows in two parts.
#[derive(Clone, Copy)]
pub(crate) struct RowLse<'a> {
    /// `[rows]`: -inf for a row that attends to nothing.
    pub(crate) lse: &'a [f32],
    /// `[rows]`: the rounding error of the LSE.
    pub(crate) rest: &'a [f32],
}

impl RowLse<'_> {
    #[inline(always)]
    pub(crate) fn attends_to_nothing(&self, row: usize) -> bool {
        self.lse[row] == f32::NEG_INFINITY
    }

    /// The difference between a logit and its row's LSE. Large numbers cancel before anything small is subtracted.
    #[inline(always)]
    pub(crate) fn above(&self, row: usize, logit: f32) -> f32 {
        (logit - self.lse[row]) - self.rest[row]
    }
}

/// `x`, but 0 if it is greater. NaN stays: no comparison with it is true.
#[inline(always)]
pub(crate) fn at_most_0(x: f32) -> f32 {
    if x > 0.0 { 0.0 } else { x }
}

pub(crate) struct GradientBlock<'a, L> {
    /// `[rows, columns]`: scaled products in, probabilities with dropout out, 0 where not attended to.
    pub(crate) p: &'a mut [f32],
    /// `[rows, columns]`: gradients of the probabilities with dropout in, of the scaled products out.
    pub(crate) ds: &'a mut [f32],
    pub(crate) block: &'a KeyBlock<'a>,
    pub(crate) softcap: Option<f32>,
    pub(super) dropout: Option<BlockMask<'a>>,
    pub(crate) lse: RowLse<'a>,
    /// `[rows]`: `sum(grad_out * out) - grad_lse`.
    pub(crate) delta: &'a [f32],
    /// Takes the gradients of the logits.
    pub(crate) logits: L,
}

impl<L: LogitGradients> Loop for GradientBlock<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match (self.softcap, self.block.visible) {
            (None, Visibility::Queries(visible)) => self.rows::<FUSED, false, _>(1.0, visible),
            (None, Visibility::Bits(visible)) => self.rows::<FUSED, false, _>(1.0, visible),
            (Some(cap), Visibility::Queries(visible)) => self.rows::<FUSED, true, _>(cap, visible),
            (Some(cap), Visibility::Bits(visible)) => self.rows::<FUSED, true, _>(cap, visible),
        }
    }
}

impl<L: LogitGradients> GradientBlock<'_, L> {
    #[inline(always)]
    fn rows<const FUSED: bool, const CAPPED: bool, V: VisiblePairs>(
        mut self,
        cap: f32,
        visible: V,
    ) {
        let columns = self.block.columns;
        let tested = self.block.tested / LANES;
        let blocks = self.p.chunks_exact_mut(columns);
        let blocks = blocks.zip(self.ds.chunks_exact_mut(columns));
        for (r, (p, ds)) in blocks.enumerate() {
            let delta = self.delta[r];
            if self.lse.attends_to_nothing(r) {
                p.fill(0.0);
                ds.fill(0.0);
                self.logits.clear_row(r, columns / LANES);
                continue;
            }
            let (p, _) = p.as_chunks_mut::<LANES>();
            let (ds, _) = ds.as_chunks_mut::<LANES>();
            let bias = self.block.bias_of(r);
            let at = self.block.row(r);
            if let Some(dropout) = self.dropout {
                dropout.apply(r, ds);
            }
            for c in 0..p.len() {
                let (p, ds, bias) = (&mut p[c], &mut ds[c], &bias[c]);
                let mut logit_gradient = [0.0; LANES];
                for t in 0..LANES {
                    let (product, slope) = if CAPPED {
                        let capped = tanh::<FUSED>(p[t] / cap);
                        (cap * capped, 1.0 - capped * capped)
                    } else {
                        (p[t], 1.0)
                    };
                    // The row's sum includes this term, whatever the rounding of both is: no probability exceeds 1.
                    p[t] = exp::<FUSED>(at_most_0(self.lse.above(r, product + bias[t])));
                    logit_gradient[t] = p[t] * (ds[t] - delta);
                    ds[t] = logit_gradient[t] * slope;
                }
                if c >= tested {
                    let visible = visible.lanes(at, c);
                    for t in 0..LANES {
                        let attends = visible.contains(t);
                        p[t] = if attends { p[t] } else { 0.0 };
                        ds[t] = if attends { ds[t] } else { 0.0 };
                        logit_gradient[t] = if attends { logit_gradient[t] } else { 0.0 };
                    }
                }
                self.logits.add(r * (columns / LANES), c, &logit_gradient);
            }
            if let Some(dropout) = self.dropout {
                dropout.apply(r, p);
            }
        }
    }
}

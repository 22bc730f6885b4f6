//! The loops over a block of logits. As in [`crate::attention::softmax`], with what a row sees as bits: hidden pairs are
//! replaced, never multiplied.

use crate::keys::planned::{MaskedKeys, TileBlocks};
use crate::simd::{LANES, Loop, exp, tanh};

/// One block of the online softmax.
pub(crate) struct SoftmaxBlock<'a> {
    /// `[rows, columns]`: scaled products in, `exp(logit - max)` out, 0 where hidden.
    pub(crate) p: &'a mut [f32],
    pub(crate) keys: &'a MaskedKeys,
    pub(crate) seen: &'a TileBlocks,
    pub(crate) softcap: Option<f32>,
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
        let keys = self.keys;
        let dim = self.acc.len() / self.max.len();
        for (r, row) in self.p.chunks_exact_mut(keys.columns).enumerate() {
            let (row, _) = row.as_chunks_mut::<LANES>();
            let (bias, _) = keys.bias_of(r).as_chunks::<LANES>();
            if let Some(cap) = self.softcap {
                for x in row.as_flattened_mut() {
                    *x = cap * tanh::<FUSED>(*x / cap);
                }
            }
            // A comparison with NaN is false: the maximum ignores NaN, the exponential does not.
            let mut maxima = [f32::NEG_INFINITY; LANES];
            for (c, (x, bias)) in row.iter_mut().zip(bias).enumerate() {
                let seen = if keys.full {
                    u32::MAX
                } else {
                    self.seen.lanes(keys.first, r, c)
                };
                for t in 0..LANES {
                    let shown = seen >> t & 1 == 1;
                    x[t] = if shown {
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
        }
    }
}

/// One block of the softmax gradient.
pub(crate) struct GradientBlock<'a> {
    /// `[rows, columns]`: scaled products in, probabilities out, 0 where hidden.
    pub(crate) p: &'a mut [f32],
    /// `[rows, columns]`: gradients of the probabilities in, of the scaled products out.
    pub(crate) ds: &'a mut [f32],
    /// `[rows, columns]`: gradients of the logits, so of the biases; overwritten.
    pub(crate) dlogit: &'a mut [f32],
    pub(crate) keys: &'a MaskedKeys,
    pub(crate) seen: &'a TileBlocks,
    pub(crate) softcap: Option<f32>,
    /// `[rows]`: -inf for a row that sees nothing.
    pub(crate) lse: &'a [f32],
    /// `[rows]`: `sum(grad_out * out) - grad_lse`.
    pub(crate) delta: &'a [f32],
}

impl Loop for GradientBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (keys, columns) = (self.keys, self.keys.columns);
        let blocks = (self.p.chunks_exact_mut(columns))
            .zip(self.ds.chunks_exact_mut(columns))
            .zip(self.dlogit.chunks_exact_mut(columns));
        for (r, ((p, ds), dlogit)) in blocks.enumerate() {
            let (lse, delta) = (self.lse[r], self.delta[r]);
            if lse == f32::NEG_INFINITY {
                p.fill(0.0);
                ds.fill(0.0);
                dlogit.fill(0.0);
                continue;
            }
            let (p, _) = p.as_chunks_mut::<LANES>();
            let (ds, _) = ds.as_chunks_mut::<LANES>();
            let (dlogit, _) = dlogit.as_chunks_mut::<LANES>();
            let (bias, _) = keys.bias_of(r).as_chunks::<LANES>();
            for c in 0..p.len() {
                let (p, ds, dlogit, bias) = (&mut p[c], &mut ds[c], &mut dlogit[c], &bias[c]);
                let seen = if keys.full {
                    u32::MAX
                } else {
                    self.seen.lanes(keys.first, r, c)
                };
                for t in 0..LANES {
                    let shown = seen >> t & 1 == 1;
                    let (product, slope) = match self.softcap {
                        None => (p[t], 1.0),
                        Some(cap) => {
                            let capped = tanh::<FUSED>(p[t] / cap);
                            (cap * capped, 1.0 - capped * capped)
                        }
                    };
                    let weight = exp::<FUSED>(product + bias[t] - lse);
                    let gradient = weight * (ds[t] - delta);
                    p[t] = if shown { weight } else { 0.0 };
                    dlogit[t] = if shown { gradient } else { 0.0 };
                    ds[t] = if shown { gradient * slope } else { 0.0 };
                }
            }
        }
    }
}

//! The loops over a block of logits: online softmax forward, its gradient backward.
//!
//! A block is `[rows, columns]` with `columns` a multiple of [`LANES`]; row `r` is query
//! `r % queries` of the tile. The columns from `tested` on hold pairs that are not selected: those are
//! replaced, never multiplied, so nothing a key or a query holds leaks through them.

use crate::scratch::KeyBlock;
use crate::simd::{LANES, Loop, exp, tanh};

/// One block of the online softmax: turns scaled products into probabilities relative to the running
/// maximum and rescales what the earlier blocks left.
pub(crate) struct SoftmaxBlock<'a> {
    /// `[rows, columns]`: scaled products in, `exp(logit - max)` out, 0 where not selected.
    pub(crate) p: &'a mut [f32],
    pub(crate) block: &'a KeyBlock,
    /// Queries of the tile.
    pub(crate) queries: usize,
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
        let columns = self.block.columns;
        let dim = self.acc.len() / self.max.len();
        let (z, _) = self.block.z.read(columns).as_chunks::<LANES>();
        let (start, _) = self.block.start.as_chunks::<LANES>();
        let (end, _) = self.block.end.as_chunks::<LANES>();
        let tested = self.block.tested / LANES;
        for (r, row) in self.p.chunks_exact_mut(columns).enumerate() {
            let (row, _) = row.as_chunks_mut::<LANES>();
            if let Some(cap) = self.softcap {
                for x in row.as_flattened_mut() {
                    *x = cap * tanh::<FUSED>(*x / cap);
                }
            }
            // A comparison with NaN is false: the maximum ignores NaN, the exponential does not.
            let mut maxima = [f32::NEG_INFINITY; LANES];
            let (inner, edge) = row.split_at_mut(tested);
            for (x, z) in inner.iter_mut().zip(z) {
                for t in 0..LANES {
                    x[t] += z[t];
                    maxima[t] = if x[t] > maxima[t] { x[t] } else { maxima[t] };
                }
            }
            let i = (r % self.queries) as i32;
            for (c, x) in edge.iter_mut().enumerate() {
                let (z, start, end) = (&z[tested + c], &start[tested + c], &end[tested + c]);
                for t in 0..LANES {
                    let attends = (start[t] <= i) & (i < end[t]);
                    x[t] = if attends {
                        x[t] + z[t]
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
    /// `[rows, columns]`: scaled products in, probabilities out, 0 where not selected.
    pub(crate) p: &'a mut [f32],
    /// `[rows, columns]`: gradients of the probabilities in, of the scaled products out.
    pub(crate) ds: &'a mut [f32],
    pub(crate) block: &'a KeyBlock,
    /// Queries of the tile.
    pub(crate) queries: usize,
    pub(crate) softcap: Option<f32>,
    /// `[rows]`: -inf for a row that attends to nothing.
    pub(crate) lse: &'a [f32],
    /// `[rows]`: `sum(grad_out * out) - grad_lse`.
    pub(crate) delta: &'a [f32],
    /// `[columns]`: sums of the logits' gradients over the rows, overwritten.
    pub(crate) dz: &'a mut [f32],
}

impl Loop for GradientBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.softcap {
            None => self.rows::<FUSED, false>(1.0),
            Some(cap) => self.rows::<FUSED, true>(cap),
        }
    }
}

impl GradientBlock<'_> {
    #[inline(always)]
    fn rows<const FUSED: bool, const CAPPED: bool>(self, cap: f32) {
        let columns = self.block.columns;
        let (z, _) = self.block.z.read(columns).as_chunks::<LANES>();
        let (start, _) = self.block.start.as_chunks::<LANES>();
        let (end, _) = self.block.end.as_chunks::<LANES>();
        let (dz, _) = self.dz.as_chunks_mut::<LANES>();
        let tested = self.block.tested / LANES;
        dz.fill([0.0; LANES]);
        let blocks = self
            .p
            .chunks_exact_mut(columns)
            .zip(self.ds.chunks_exact_mut(columns));
        for (r, (p, ds)) in blocks.enumerate() {
            let (lse, delta) = (self.lse[r], self.delta[r]);
            if lse == f32::NEG_INFINITY {
                p.fill(0.0);
                ds.fill(0.0);
                continue;
            }
            let (p, _) = p.as_chunks_mut::<LANES>();
            let (ds, _) = ds.as_chunks_mut::<LANES>();
            let i = (r % self.queries) as i32;
            for c in 0..p.len() {
                let (p, ds, z, dz) = (&mut p[c], &mut ds[c], &z[c], &mut dz[c]);
                let mut logit_gradient = [0.0; LANES];
                for t in 0..LANES {
                    let (product, slope) = if CAPPED {
                        let capped = tanh::<FUSED>(p[t] / cap);
                        (cap * capped, 1.0 - capped * capped)
                    } else {
                        (p[t], 1.0)
                    };
                    p[t] = exp::<FUSED>(product + z[t] - lse);
                    logit_gradient[t] = p[t] * (ds[t] - delta);
                    ds[t] = if CAPPED {
                        logit_gradient[t] * slope
                    } else {
                        logit_gradient[t]
                    };
                }
                if c >= tested {
                    for t in 0..LANES {
                        let attends = (start[c][t] <= i) & (i < end[c][t]);
                        p[t] = if attends { p[t] } else { 0.0 };
                        ds[t] = if attends { ds[t] } else { 0.0 };
                        logit_gradient[t] = if attends { logit_gradient[t] } else { 0.0 };
                    }
                }
                for t in 0..LANES {
                    dz[t] += logit_gradient[t];
                }
            }
        }
    }
}

//! Online softmax over the inner tiles that stream past an outer tile.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::math::{log_sum_rest, rounding_loss};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::memory::{NotFinite, Row4, TileRows, shared_weights, store_strided};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::visibility::{Visibility, VisibilityExpand, logit};
use cubecl::prelude::*;

/// A unit's part of its outer rows, in registers except for the data that units share.
#[derive(CubeType)]
pub(crate) struct OnlineSoftmax {
    /// Products of the current tile, then logits.
    s: Array<f32>,
    /// The output, `unit_vectors` per outer row: relative to the running maximum until [`finish`](Self::finish).
    pub acc: Array<Row4>,
    /// The running maximum of each outer row; after [`finish`](Self::finish), its LSE.
    pub row_max: Array<f32>,
    /// After [`finish`](Self::finish), the rounding error of each LSE.
    pub row_rest: Array<f32>,
    /// This unit's part of each row's sum.
    row_sum: Array<f32>,
    /// In shared memory: partial results of the units along x for each outer row, `[outer_rows, units_x]`.
    partial: Shared<[f32]>,
    /// In shared memory: the probabilities of the current tile, in the layout that [`accumulate`] reads.
    weights: Shared<[Row4]>,
}

#[cube]
impl OnlineSoftmax {
    /// The state before the first tile.
    pub(crate) fn new(#[comptime] bp: Blueprint) -> OnlineSoftmax {
        let mut acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
        let mut row_max = Array::<f32>::new(comptime!(bp.micro.outer));
        let mut row_sum = Array::<f32>::new(comptime!(bp.micro.outer));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            row_max[o] = negative_infinity();
            row_sum[o] = 0.0f32;
        }
        #[unroll(bp.unroll())]
        for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
            acc[n] = Row4::new(0.0f32);
        }
        OnlineSoftmax {
            s: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            acc,
            row_max,
            row_rest: Array::<f32>::new(comptime!(bp.micro.outer)),
            row_sum,
            partial: Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * bp.micro.units_x)),
            weights: shared_weights(bp),
        }
    }

    /// Processes a synchronised inner tile `k_rows`, `v_rows`; the caller synchronises before it loads another.
    pub(crate) fn attend<V: Visibility>(
        &mut self,
        q_rows: &Shared<[Row4]>,
        k_rows: &Shared<[Row4]>,
        v_rows: &Shared<[Row4]>,
        visibility: &V,
        not_finite: &NotFinite,
        scaling: &Scaling,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        products(q_rows, k_rows, &mut self.s, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                let inner = x + i * units_x;
                let n = o * comptime!(bp.micro.inner) + i;
                let mut value = negative_infinity();
                if visibility.selected(outer, inner) {
                    let product = logit(self.s[n], scaling.scale, scaling.softcap, bp);
                    value = visibility.biased(product, outer, inner);
                }
                self.s[n] = value;
            }
        }
        self.weigh::<V>(visibility, bp);
        if not_finite.get() {
            accumulate_selected::<V>(&mut self.acc, &self.weights, v_rows, visibility, bp);
        } else {
            accumulate(&mut self.acc, &self.weights, v_rows, bp);
        }
    }

    /// Turns the logits [`s`](Self::s), −∞ where a pair is not selected, into weights relative to the new maxima, to
    /// which it rescales sums and output. Dropout is in the weights, not in the sums. Synchronises.
    fn weigh<V: Visibility>(&mut self, visibility: &V, #[comptime] bp: Blueprint) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let mut unit_max = negative_infinity();
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                unit_max = max(unit_max, self.s[o * comptime!(bp.micro.inner) + i]);
            }
            self.partial[(y + o * units_y) * units_x + x] = unit_max;
        }
        sync_cube();

        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            let old_max = self.row_max[o];
            let mut new_max = old_max;
            for unit in 0..units_x {
                new_max = max(new_max, self.partial[outer * units_x + unit]);
            }
            self.row_max[o] = new_max;
            // While a row has seen no finite logit, -inf - -inf would make NaN.
            let mut shift = new_max;
            if new_max == negative_infinity() {
                shift = 0.0f32;
            }
            let rescale = (old_max - shift).exp();
            let mut sum = self.row_sum[o] * rescale;
            #[unroll(bp.unroll())]
            for part in 0..comptime!(bp.weight_vectors()) {
                let mut weight = Row4::new(0.0f32);
                #[unroll]
                for e in 0..LANES {
                    let at = o * comptime!(bp.micro.inner) + part * LANES + e;
                    let p = (self.s[at] - shift).exp();
                    sum += p;
                    let inner = x + (part * LANES + e) * units_x;
                    weight.insert(e, visibility.dropped(p, outer, inner));
                }
                let column = x * comptime!(bp.weight_vectors()) + part;
                self.weights[outer * comptime!(bp.weight_stride()) + column] = weight;
            }
            self.row_sum[o] = sum;
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let n = o * comptime!(bp.unit_vectors()) + c;
                self.acc[n] *= Row4::new(rescale);
            }
        }
        sync_cube();
    }

    /// Divides the output by the sums and turns maxima into LSEs: zeros and −∞ if nothing was selected. Synchronises.
    pub(crate) fn finish(&mut self, #[comptime] bp: Blueprint) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        // The maxima are no longer read once the last tile's weights are written.
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            self.partial[(y + o * units_y) * units_x + x] = self.row_sum[o];
        }
        sync_cube();
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            let mut sum = 0.0f32;
            for unit in 0..units_x {
                sum += self.partial[outer * units_x + unit];
            }
            let mut inverse = 1.0f32 / sum;
            let log_sum = sum.ln();
            let reference = self.row_max[o];
            let mut row_lse = reference + log_sum;
            if sum == 0.0f32 {
                inverse = 0.0f32;
                row_lse = negative_infinity();
            }
            self.row_max[o] = row_lse;
            self.row_rest[o] = log_sum_rest(reference, log_sum, row_lse);
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let n = o * comptime!(bp.unit_vectors()) + c;
                let mut value = self.acc[n] * Row4::new(inverse);
                // Not the inverse test: wgpu's `!=` is false for NaN, which must be kept.
                if sum == 0.0f32 {
                    value = Row4::new(0.0f32);
                }
                self.acc[n] = value;
            }
        }
    }

    /// Writes the finished rows to `out`, `[batch, heads, len, head_dim]` with heads and queries in either order, and
    /// the LSEs.
    pub(crate) fn store<F: Float, N: Size>(
        &self,
        out: &mut Tensor<Vector<F, N>>,
        lse: &mut Tensor<f32>,
        to: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        store_strided::<F, N>(out, to, &self.acc, bp);
        let heads = out.shape(1);
        if UNIT_POS_X == 0 {
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let row = to.first + UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
                if row < to.end {
                    lse[(to.batch * heads + to.head) * to.end + row] = self.row_max[o];
                }
            }
        }
    }

    /// Writes the rounding errors of the LSEs, as [`store`](Self::store) writes the LSEs; there are `heads` heads.
    pub(crate) fn store_lse_rest(
        &self,
        lse_rest: &mut Tensor<f32>,
        to: &TileRows,
        heads: usize,
        #[comptime] bp: Blueprint,
    ) {
        if UNIT_POS_X == 0 {
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let row = to.first + UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
                if row < to.end {
                    lse_rest[(to.batch * heads + to.head) * to.end + row] = self.row_rest[o];
                }
            }
        }
    }

    /// Writes the rounding errors of the finished rows, as [`store`](Self::store) writes the rows, and overwrites them.
    pub(crate) fn store_residual<F: Float, N: Size>(
        &mut self,
        residual: &mut Tensor<Vector<F, N>>,
        to: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        #[unroll(bp.unroll())]
        for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
            let mut value = self.acc[n];
            #[unroll]
            for e in 0..LANES {
                value.insert(e, rounding_loss::<F>(value.extract(e)));
            }
            self.acc[n] = value;
        }
        store_strided::<F, N>(residual, to, &self.acc, bp);
    }
}

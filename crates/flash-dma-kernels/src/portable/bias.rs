//! The portable kernel of the gradient of a bias, in its own shape.

use crate::args::Scaling;
use crate::portable::args::{Keys, LogitTerms, Operands, OrderedIntervals, SavedRows, Sizes};
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::{KeyRows, NotFinite, QueryRows, TileRows};
use crate::portable::product::products;
use crate::portable::tile_visibility::TileVisibility;
use crate::portable::visibility::{Visibility, VisibilityExpand, logit};
use cubecl::prelude::*;

/// One cube owns the tile of keys `CUBE_POS_X` and of queries `CUBE_POS_Y` of the bias's head `CUBE_POS_Z`, counted
/// over its sequences. It sums every pair that reads one of its elements, in all the heads, sequences and queries to
/// which the bias broadcasts, in f32 in registers, in a fixed order. It writes its elements of the contiguous
/// `grad_bias`, which has the shape of `bias` and is overwritten. Inputs as in
/// [`dkdv_kernel`](crate::portable::dkdv::dkdv_kernel), but keys have no intervals. If the queries are `shared`, the
/// bias has one element for all of them; it has all keys.
///
/// It costs two matrix products per pair more than the gradients of k and v, and needs neither atomics nor memory.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    keys: &Keys<OrderedIntervals>,
    terms: &LogitTerms,
    grad_bias: &mut Tensor<f32>,
    #[comptime] shared: bool,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let sizes = Sizes::of::<F, N>(operands);
    let (bias_batches, bias_heads) = (grad_bias.shape(0), grad_bias.shape(1));
    let own = CUBE_POS_Z as usize;
    let (own_head, own_batch) = (own % bias_heads, own / bias_heads);
    let heads_each = sizes.q_heads / bias_heads;
    let batches_each = operands.q.shape(0) / bias_batches;

    let mut visibility = TileVisibility::new::<OrderedIntervals>(keys, terms, true, bp);
    let mut not_finite = NotFinite::new();
    let mut key_rows = KeyRows::new(true, bp);
    let mut query_rows = QueryRows::new(false, bp);
    let mut sums = PairSums::new(bp);

    let first_key = CUBE_POS_X as usize * outer_rows;
    let mut first_query_tile = CUBE_POS_Y as usize;
    let mut query_tiles = 1usize;
    if comptime!(shared) {
        first_query_tile = 0usize;
        query_tiles = sizes.q_len.div_ceil(inner_rows);
    }
    for step in 0..batches_each * heads_each {
        let batch = own_batch + step / heads_each;
        let head = own_head * heads_each + step % heads_each;
        let tile = TileRows::new(batch, sizes.kv_head(head), first_key, sizes.k_len);
        sync_cube();
        visibility.own_keys(keys, &tile, bp);
        key_rows.load::<F, N>(operands, &tile, &mut not_finite, bp);
        for query_tile in first_query_tile..first_query_tile + query_tiles {
            let queries = TileRows::new(batch, head, query_tile * inner_rows, sizes.q_len);
            if visibility.is_active(&queries, &tile, &sizes, bp) {
                sync_cube();
                query_rows.load_sums::<F, N>(saved, &queries, &sizes, bp);
                visibility.meet_queries(&queries, &tile, &query_rows.lse, &sizes, bp);
                query_rows.load::<F, N>(operands, saved, &queries, &mut not_finite, bp);
                sync_cube();
                sums.add::<TileVisibility>(&key_rows, &query_rows, &visibility, &terms.scaling, bp);
            }
        }
    }
    let first_query = first_query_tile * inner_rows;
    sums.store(grad_bias, first_query, first_key, shared, bp);
}

/// The gradients of the biases of a tile of pairs.
#[derive(CubeType)]
struct PairSums {
    /// Products of keys and queries.
    s: Array<f32>,
    /// Products of values and output gradients.
    dp: Array<f32>,
    acc: Array<f32>,
    /// In shared memory: `[outer_rows, inner_rows]`.
    pairs: Shared<[f32]>,
}

#[cube]
impl PairSums {
    fn new(#[comptime] bp: Blueprint) -> PairSums {
        let mut acc = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
        #[unroll(bp.unroll())]
        for n in 0..comptime!(bp.micro.outer * bp.micro.inner) {
            acc[n] = 0.0f32;
        }
        PairSums {
            s: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            dp: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            acc,
            pairs: Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * bp.inner_rows())),
        }
    }

    /// Adds the gradients of the logits of a tile, which must have been synchronised.
    fn add<V: Visibility>(
        &mut self,
        keys: &KeyRows,
        queries: &QueryRows,
        visibility: &V,
        scaling: &Scaling,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        products(&keys.k, &queries.q, &mut self.s, bp);
        products(&keys.v, &queries.grad_out, &mut self.dp, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * comptime!(bp.micro.units_y);
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                let inner = x + i * comptime!(bp.micro.units_x);
                let n = o * comptime!(bp.micro.inner) + i;
                if visibility.selected(outer, inner) {
                    let value = logit(self.s[n], scaling.scale, scaling.softcap, bp);
                    let biased = visibility.biased(value, outer, inner);
                    let p = queries.probability(biased, inner);
                    let dp = visibility.dropped(self.dp[n], outer, inner);
                    self.acc[n] += p * (dp - queries.delta[inner]);
                }
            }
        }
    }

    /// Writes the tile that begins at a pair, summed over the queries if they are `shared`.
    fn store(
        &mut self,
        grad_bias: &mut Tensor<f32>,
        first_query: usize,
        first_key: usize,
        #[comptime] shared: bool,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                let at = (y + o * units_y) * inner_rows + x + i * units_x;
                self.pairs[at] = self.acc[o * comptime!(bp.micro.inner) + i];
            }
        }
        sync_cube();
        // One unit per element.
        let queries_added = comptime!(if shared { inner_rows } else { 1usize });
        let mut item = UNIT_POS as usize;
        while item < comptime!(outer_rows * inner_rows / queries_added) {
            // Neighbouring units write neighbouring keys.
            let (key, query) = (item % outer_rows, item / outer_rows);
            let mut sum = 0.0f32;
            for i in 0..queries_added {
                sum += self.pairs[key * inner_rows + query + i];
            }
            let to_key = first_key + key;
            let to_query = first_query + query;
            let (queries, keys) = (grad_bias.shape(2), grad_bias.shape(3));
            if to_key < keys && to_query < queries {
                grad_bias[(CUBE_POS_Z as usize * queries + to_query) * keys + to_key] = sum;
            }
            item += comptime!(bp.units());
        }
    }
}

//! The gradient of q: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::portable::args::{Keys, ListedIntervals, LogitTerms, Operands, SavedRows, Sizes};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::keys::KeyTiles;
use crate::portable::memory::{
    KeyRows, NotFinite, QueryRows, Row4, TileRows, shared_weights, store_tile,
};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::tile_visibility::TileVisibility;
use crate::portable::visibility::{Visibility, VisibilityExpand, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the query tile `first_tile + CUBE_POS_X` of query head `CUBE_POS_Y` of sequence `CUBE_POS_Z`, and
/// writes its rows of `grad_q`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `lse`, `lse_rest`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `keys`, `terms` | as in the [forward kernel](crate::portable::forward::forward_kernel) |
/// | `grad_q` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    keys: &Keys<ListedIntervals>,
    terms: &LogitTerms,
    grad_q: &mut Tensor<Vector<F, N>>,
    first_tile: usize,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes::of::<F, N>(operands);
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let first_query = (first_tile + CUBE_POS_X as usize) * comptime!(bp.outer_rows());
    let queries = TileRows::new(batch, head, first_query, sizes.q_len);
    let tiles = KeyTiles::of_queries(keys, &queries, sizes.kv_head(head), &sizes, bp);

    let mut visibility = TileVisibility::new::<ListedIntervals>(keys, terms, false, bp);
    let mut not_finite = NotFinite::new();
    let mut query_rows = QueryRows::new(true, bp);
    let mut key_rows = KeyRows::new(false, bp);
    let mut gradient = QueryGradient::new(bp);

    query_rows.load_sums::<F, N>(saved, &queries, &sizes, bp);
    let lse = ComptimeOption::new_Some(&query_rows.lse);
    visibility.own_queries(&queries, lse, &sizes, bp);
    query_rows.load::<F, N>(operands, saved, &queries, &mut not_finite, bp);
    not_finite.first_tile();
    for n in 0..tiles.count(bp) {
        let tile = tiles.tile(n, bp);
        if visibility.is_active(&queries, &tile, &sizes, bp) {
            sync_cube();
            let lse = ComptimeOption::new_Some(&query_rows.lse);
            visibility.meet_keys(&tiles, &tile, &queries, lse, &sizes, bp);
            key_rows.load::<F, N>(operands, &tile, &mut not_finite, bp);
            sync_cube();
            not_finite.clear_next();
            gradient.add::<TileVisibility>(
                &query_rows,
                &key_rows,
                &visibility,
                &not_finite,
                &terms.scaling,
                bp,
            );
            not_finite.next_tile();
        }
    }
    store_tile::<F, N>(grad_q, &queries, &gradient.acc, bp);
}

/// The gradient of the query rows that a unit owns.
#[derive(CubeType)]
struct QueryGradient {
    /// Products of queries and keys, then unused.
    s: Array<f32>,
    /// Products of output gradients and values.
    dp: Array<f32>,
    /// `unit_vectors` per outer row.
    acc: Array<Row4>,
    /// In shared memory: the gradients of the products.
    weights: Shared<[Row4]>,
}

#[cube]
impl QueryGradient {
    fn new(#[comptime] bp: Blueprint) -> QueryGradient {
        let mut acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
        #[unroll(bp.unroll())]
        for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
            acc[n] = Row4::new(0.0f32);
        }
        QueryGradient {
            s: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            dp: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            acc,
            weights: shared_weights(bp),
        }
    }

    /// Adds the contributions of a synchronised tile of keys; the caller synchronises before it loads another.
    fn add<V: Visibility>(
        &mut self,
        queries: &QueryRows,
        keys: &KeyRows,
        visibility: &V,
        not_finite: &NotFinite,
        scaling: &Scaling,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        products(&queries.q, &keys.k, &mut self.s, bp);
        products(&queries.grad_out, &keys.v, &mut self.dp, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            #[unroll(bp.unroll())]
            for part in 0..comptime!(bp.weight_vectors()) {
                let mut weight = Row4::new(0.0f32);
                #[unroll]
                for e in 0..LANES {
                    let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                    let inner = x + (part * LANES + e) * units_x;
                    if visibility.selected(outer, inner) {
                        let value = logit(self.s[n], scaling.scale, scaling.softcap, bp);
                        let biased = visibility.biased(value, outer, inner);
                        let p = queries.probability(biased, outer);
                        let dp = visibility.dropped(self.dp[n], outer, inner);
                        let ds = p * (dp - queries.delta[outer]);
                        let slope = logit_slope(value, scaling.scale, scaling.softcap, bp);
                        weight.insert(e, ds * slope);
                    }
                }
                let column = x * comptime!(bp.weight_vectors()) + part;
                self.weights[outer * comptime!(bp.weight_stride()) + column] = weight;
            }
        }
        sync_cube();
        if not_finite.get() {
            accumulate_selected::<V>(&mut self.acc, &self.weights, &keys.k, visibility, bp);
        } else {
            accumulate(&mut self.acc, &self.weights, &keys.k, bp);
        }
    }
}

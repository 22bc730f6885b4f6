//! The gradients of k, v and the scores: key tiles stream the queries that attend to them.

use crate::args::Scaling;
use crate::portable::args::{
    KeyGradients, Keys, KeysExpand, LogitTerms, Operands, OrderedIntervals, SavedRows, Sizes,
};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::memory::{
    KeyRows, NotFinite, QueryRows, Row4, RowList, TileRows, shared_weights, store_tile,
};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::tile_visibility::TileVisibility;
use crate::portable::visibility::{Visibility, VisibilityExpand, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the key tile `CUBE_POS_X` of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: it streams, for every
/// query head of the group, the queries that may attend to one of its keys, and writes its keys' rows of the gradients.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `lse`, `lse_rest`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `keys` | nothing, [`OrderedIntervals`], or a [`TilePlan`](crate::portable::args::TilePlan) |
/// | `bias`, `alibi`, `dropout` | as in the [forward kernel](crate::portable::forward::forward_kernel) |
/// | `grads` | [`KeyGradients`], overwritten; with intervals, only the listed keys |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dkdv_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    keys: &Keys<OrderedIntervals>,
    terms: &LogitTerms,
    grads: &mut KeyGradients<F, N>,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes::of::<F, N>(operands);
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let group = sizes.q_heads / sizes.kv_heads;
    let tile = key_tile(keys, batch, kv_head, &sizes, bp);
    if tile.first >= tile.end {
        terminate!();
    }

    let mut visibility = TileVisibility::new::<OrderedIntervals>(keys, terms, true, bp);
    let mut not_finite = NotFinite::new();
    let mut key_rows = KeyRows::new(true, bp);
    let mut query_rows = QueryRows::new(false, bp);
    let mut sums = KeySums::new(bp);

    visibility.own_keys(keys, &tile, bp);
    key_rows.load::<F, N>(operands, &tile, &mut not_finite, bp);
    not_finite.first_tile();
    sync_cube();
    let (first_query, end_query) = visibility.queries(&tile, &sizes, bp);
    let tiles = (end_query - first_query).div_ceil(comptime!(bp.inner_rows()));
    for step in 0..tiles * group {
        let head = kv_head * group + step / tiles;
        let from = first_query + step % tiles * comptime!(bp.inner_rows());
        let queries = TileRows::new(batch, head, from, sizes.q_len);
        if visibility.is_active(&queries, &tile, &sizes, bp) {
            sync_cube();
            query_rows.load_sums::<F, N>(saved, &queries, &sizes, bp);
            visibility.meet_queries(&queries, &tile, &query_rows.lse, &sizes, bp);
            query_rows.load::<F, N>(operands, saved, &queries, &mut not_finite, bp);
            sync_cube();
            not_finite.clear_next();
            sums.add::<TileVisibility>(
                &key_rows,
                &query_rows,
                &visibility,
                &not_finite,
                &terms.scaling,
                bp,
            );
            not_finite.next_tile();
        }
    }
    store_tile::<F, N>(&mut grads.k, &tile, &sums.k, bp);
    store_tile::<F, N>(&mut grads.v, &tile, &sums.v, bp);
    #[comptime]
    match &mut grads.scores {
        ComptimeOption::Some(scores) => sums.store_scores(scores, &tile, bp),
        ComptimeOption::None => {}
    }
}

#[cube]
fn key_tile<'a>(
    keys: &'a Keys<OrderedIntervals>,
    batch: usize,
    kv_head: usize,
    sizes: &Sizes,
    #[comptime] bp: Blueprint,
) -> TileRows<'a> {
    let first = CUBE_POS_X as usize * comptime!(bp.outer_rows());
    #[comptime]
    match keys {
        Keys::Intervals(ordered) => {
            let kv_row = batch * sizes.kv_heads + kv_head;
            TileRows::<'a> {
                batch,
                head: kv_head,
                first,
                end: ordered.counts[kv_row] as usize,
                list: ComptimeOption::new_Some(RowList::<'a> {
                    list: &ordered.keys,
                    base: kv_row * ordered.keys.stride(0),
                }),
            }
        }
        _ => TileRows::new(batch, kv_head, first, sizes.k_len),
    }
}

/// The gradients of the keys that a unit owns.
#[derive(CubeType)]
struct KeySums {
    /// Products of keys and queries.
    s: Array<f32>,
    /// Products of values and output gradients.
    dp: Array<f32>,
    /// `unit_vectors` per outer row.
    k: Array<Row4>,
    v: Array<Row4>,
    /// This unit's part of the gradient of each outer row's score; zero without scores.
    score: Array<f32>,
    /// In shared memory: the probabilities, and the gradients of the products.
    p_weights: Shared<[Row4]>,
    ds_weights: Shared<[Row4]>,
}

#[cube]
impl KeySums {
    fn new(#[comptime] bp: Blueprint) -> KeySums {
        let mut k = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
        let mut v = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
        let mut score = Array::<f32>::new(comptime!(bp.micro.outer));
        #[unroll(bp.unroll())]
        for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
            k[n] = Row4::new(0.0f32);
            v[n] = Row4::new(0.0f32);
        }
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            score[o] = 0.0f32;
        }
        KeySums {
            s: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            dp: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            k,
            v,
            score,
            p_weights: shared_weights(bp),
            ds_weights: shared_weights(bp),
        }
    }

    /// Adds the contributions of a synchronised tile of queries; the caller synchronises before it loads another.
    fn add<V: Visibility>(
        &mut self,
        keys: &KeyRows,
        queries: &QueryRows,
        visibility: &V,
        not_finite: &NotFinite,
        scaling: &Scaling,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        products(&keys.k, &queries.q, &mut self.s, bp);
        products(&keys.v, &queries.grad_out, &mut self.dp, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            let mut score_sum = self.score[o];
            #[unroll(bp.unroll())]
            for part in 0..comptime!(bp.weight_vectors()) {
                let mut p_weight = Row4::new(0.0f32);
                let mut ds_weight = Row4::new(0.0f32);
                #[unroll]
                for e in 0..LANES {
                    let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                    let inner = x + (part * LANES + e) * units_x;
                    if visibility.selected(outer, inner) {
                        let value = logit(self.s[n], scaling.scale, scaling.softcap, bp);
                        let biased = visibility.biased(value, outer, inner);
                        let p = queries.probability(biased, inner);
                        let dp = visibility.dropped(self.dp[n], outer, inner);
                        let ds = p * (dp - queries.delta[inner]);
                        if comptime!(bp.pattern.has_intervals()) {
                            score_sum += ds;
                        }
                        p_weight.insert(e, visibility.dropped(p, outer, inner));
                        let slope = logit_slope(value, scaling.scale, scaling.softcap, bp);
                        ds_weight.insert(e, ds * slope);
                    }
                }
                let at = outer * comptime!(bp.weight_stride())
                    + x * comptime!(bp.weight_vectors())
                    + part;
                self.p_weights[at] = p_weight;
                self.ds_weights[at] = ds_weight;
            }
            self.score[o] = score_sum;
        }
        sync_cube();
        let (p, ds) = (&self.p_weights, &self.ds_weights);
        if not_finite.get() {
            accumulate_selected::<V>(&mut self.v, p, &queries.grad_out, visibility, bp);
            accumulate_selected::<V>(&mut self.k, ds, &queries.q, visibility, bp);
        } else {
            accumulate(&mut self.v, p, &queries.grad_out, bp);
            accumulate(&mut self.k, ds, &queries.q, bp);
        }
    }

    /// Writes the gradients of the scores of the `keys`.
    fn store_scores(
        &self,
        grad_scores: &mut Tensor<f32>,
        keys: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        let mut partial = Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * units_x));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            partial[(y + o * units_y) * units_x + x] = self.score[o];
        }
        sync_cube();
        let (heads, k_len) = (grad_scores.shape(1), grad_scores.shape(2));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            if keys.first + outer < keys.end && x == 0 {
                let key = keys.index(keys.first + outer);
                let mut sum = 0.0f32;
                for unit in 0..units_x {
                    sum += partial[outer * units_x + unit];
                }
                grad_scores[(keys.batch * heads + keys.head) * k_len + key] = sum;
            }
        }
    }
}

//! The gradient of the rank: tiles of runners-up stream the queries whose window they just miss, tiles of kept keys
//! those that keep them.

use crate::alibi::AlibiArg;
use crate::args::Scaling;
use crate::math::{ln_one_plus, sigmoid, softplus};
use crate::portable::alibi::{TileAlibi, with_alibi};
use crate::portable::args::{LogitTerms, Operands, RankedList, SavedRows, Sizes};
use crate::portable::blueprint::Blueprint;
use crate::portable::intervals::KeyIntervals;
use crate::portable::memory::{KeyRows, NotFinite, QueryRows, RowList, TileRows};
use crate::portable::product::products;
use crate::portable::visibility::{Visibility, VisibilityExpand, logit};
use crate::rank_terms::{Change, ChangeKind, RankTerms};
use cubecl::prelude::*;

/// One cube owns the tile `CUBE_POS_X` of the keys of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`. It streams, for
/// every query head of the group, the queries that train the rank of one of its keys, and writes the gradients of its
/// keys' ranks; the launch for kept keys, which runs after the one for runners-up, adds them. With `x` a pair's logit
/// minus the LSE, a gradient is the sum of `sigmoid(x) * grad_out . (v - out) + grad_lse * softplus(x)`; that of a kept
/// key is given at [`OWN_OUTPUT_WEIGHT`](flash_dma_problem::OWN_OUTPUT_WEIGHT).
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `lse`, `lse_rest`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `terms` | see [`RankTerms`] |
/// | `ranked` | [`RankedList`] |
/// | `logits` | [`LogitTerms`] without a bias and dropout |
/// | `rank` | contiguous `[batch, kv_heads, k_len]`; the listed keys are overwritten or added to |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rank_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    terms: &RankTerms,
    ranked: &RankedList,
    logits: &LogitTerms,
    rank: &mut Tensor<f32>,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes::of::<F, N>(operands);
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let group = sizes.q_heads / sizes.kv_heads;
    let tile = ranked_tile(ranked, batch, kv_head, &sizes, bp);
    if tile.first >= tile.end {
        terminate!();
    }

    let mut spans = RankedSpans::new(&logits.alibi, bp);
    // Nothing multiplies a row by weights of zero, so the flags are not read.
    let mut not_finite = NotFinite::new();
    let mut key_rows = KeyRows::new(true, bp);
    let mut query_rows = QueryRows::new(false, bp);
    let mut of_lse = Shared::<[f32]>::new_slice(comptime!(bp.inner_rows()));
    let mut sums = RankSums::new(bp);

    spans.set_ranked(ranked, &tile, bp);
    key_rows.load::<F, N>(operands, &tile, &mut not_finite, bp);
    sync_cube();
    let (first_query, end_query) = spans.intervals.queries(&sizes, bp);
    let tiles = (min(end_query, sizes.q_len) - first_query).div_ceil(comptime!(bp.inner_rows()));
    for step in 0..tiles * group {
        let head = kv_head * group + step / tiles;
        let from = first_query + step % tiles * comptime!(bp.inner_rows());
        let queries = TileRows::new(batch, head, from, sizes.q_len);
        sync_cube();
        query_rows.load_sums::<F, N>(saved, &queries, &sizes, bp);
        let lse = ComptimeOption::new_Some(&query_rows.lse);
        spans.set_queries(&queries, lse, &sizes, bp);
        load_lse_gradients(terms, &mut of_lse, &queries, &sizes, bp);
        query_rows.load::<F, N>(operands, saved, &queries, &mut not_finite, bp);
        sync_cube();
        sums.add(
            &key_rows,
            &query_rows,
            &of_lse,
            &spans,
            &logits.scaling,
            terms,
            bp,
        );
    }
    sums.store(rank, &tile, comptime!(terms.adds), bp);
}

#[cube]
fn ranked_tile<'a>(
    ranked: &'a RankedList,
    batch: usize,
    kv_head: usize,
    sizes: &Sizes,
    #[comptime] bp: Blueprint,
) -> TileRows<'a> {
    let kv_row = batch * sizes.kv_heads + kv_head;
    TileRows::<'a> {
        batch,
        head: kv_head,
        first: CUBE_POS_X as usize * comptime!(bp.outer_rows()),
        end: ranked.counts[kv_row] as usize,
        list: ComptimeOption::new_Some(RowList::<'a> {
            list: &ranked.keys,
            base: kv_row * sizes.k_len,
        }),
    }
}

/// The positions that train the ranks of a tile's keys, and the ALiBi of its pairs.
#[derive(CubeType)]
struct RankedSpans<'a> {
    intervals: KeyIntervals,
    alibi: ComptimeOption<TileAlibi<'a>>,
}

#[cube]
impl<'a> RankedSpans<'a> {
    fn new(alibi: &'a AlibiArg, #[comptime] bp: Blueprint) -> RankedSpans<'a> {
        RankedSpans::<'a> {
            intervals: KeyIntervals::new(true, bp),
            alibi: TileAlibi::of(alibi, true, bp),
        }
    }

    fn set_ranked(&mut self, ranked: &RankedList, tile: &TileRows, #[comptime] bp: Blueprint) {
        self.intervals.set_ranked(ranked, tile, bp);
        #[comptime]
        match &mut self.alibi {
            ComptimeOption::Some(alibi) => alibi.set_keys(tile, bp),
            ComptimeOption::None => {}
        }
    }

    fn set_queries(
        &mut self,
        queries: &TileRows,
        lse: ComptimeOption<&Shared<[f32]>>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        self.intervals.set_queries(queries, lse, sizes, bp);
        #[comptime]
        match &mut self.alibi {
            ComptimeOption::Some(alibi) => alibi.set_queries(queries, sizes, bp),
            ComptimeOption::None => {}
        }
    }

    fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32 {
        let logit = with_alibi(&self.alibi, logit, outer, inner);
        self.intervals.biased(logit, outer, inner)
    }
}

/// Loads the LSE gradients of a tile of queries, if there are any. All units cooperate; the caller synchronises.
#[cube]
fn load_lse_gradients(
    terms: &RankTerms,
    to: &mut Shared<[f32]>,
    queries: &TileRows,
    sizes: &Sizes,
    #[comptime] bp: Blueprint,
) {
    #[comptime]
    match &terms.grad_lse {
        ComptimeOption::Some(grad_lse) => {
            let base = (queries.batch * sizes.q_heads + queries.head) * sizes.q_len;
            let mut row = UNIT_POS as usize;
            while row < comptime!(bp.inner_rows()) {
                if queries.first + row < queries.end {
                    to[row] = grad_lse[base + queries.first + row];
                }
                row += comptime!(bp.units());
            }
        }
        ComptimeOption::None => {}
    }
}

/// The factor of `v - out` of a key whose logit is `x` above the LSE.
#[cube]
fn weight(change: &Change, x: f32) -> f32 {
    match comptime!(change.kind) {
        ChangeKind::Added => sigmoid(x),
        ChangeKind::LeftOut => {
            let p = select(x > 0.0f32, 0.0f32, x).exp();
            p / (change.all - p)
        }
    }
}

/// The key's part of the LSE.
#[cube]
fn part_of_lse(change: &Change, x: f32, weight: f32) -> f32 {
    match comptime!(change.kind) {
        ChangeKind::Added => softplus(x),
        ChangeKind::LeftOut => ln_one_plus(weight),
    }
}

/// The gradients of the ranks of the keys that a unit owns.
#[derive(CubeType)]
struct RankSums {
    /// Products of keys and queries.
    s: Array<f32>,
    /// Products of values and output gradients.
    dp: Array<f32>,
    /// This unit's part of the gradient of each outer row.
    rank: Array<f32>,
}

#[cube]
impl RankSums {
    fn new(#[comptime] bp: Blueprint) -> RankSums {
        let mut rank = Array::<f32>::new(comptime!(bp.micro.outer));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            rank[o] = 0.0f32;
        }
        RankSums {
            s: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            dp: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            rank,
        }
    }

    /// Adds the contributions of a synchronised tile of queries; the caller synchronises before it loads another.
    fn add(
        &mut self,
        keys: &KeyRows,
        queries: &QueryRows,
        of_lse: &Shared<[f32]>,
        spans: &RankedSpans,
        scaling: &Scaling,
        terms: &RankTerms,
        #[comptime] bp: Blueprint,
    ) {
        let with_lse = terms.grad_lse.is_some();
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        products(&keys.k, &queries.q, &mut self.s, bp);
        products(&keys.v, &queries.grad_out, &mut self.dp, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            let mut sum = self.rank[o];
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                let inner = x + i * units_x;
                let n = o * comptime!(bp.micro.inner) + i;
                if spans.intervals.selected(outer, inner) {
                    let value = logit(self.s[n], scaling.scale, scaling.softcap, bp);
                    let biased = spans.biased(value, outer, inner);
                    let above = queries.above_lse(biased, inner);
                    let mut mean = queries.delta[inner];
                    if comptime!(with_lse) {
                        mean += of_lse[inner];
                    }
                    let weight = weight(&terms.change, above);
                    let mut change = weight * (self.dp[n] - mean);
                    if comptime!(with_lse) {
                        change += of_lse[inner] * part_of_lse(&terms.change, above, weight);
                    }
                    sum += change;
                }
            }
            self.rank[o] = sum;
        }
    }

    /// Writes the gradients of the ranks of the `keys`, or adds them.
    fn store(
        &self,
        rank: &mut Tensor<f32>,
        keys: &TileRows,
        #[comptime] adds: bool,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        let mut partial = Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * units_x));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            partial[(y + o * units_y) * units_x + x] = self.rank[o];
        }
        sync_cube();
        let (heads, k_len) = (rank.shape(1), rank.shape(2));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            if keys.first + outer < keys.end && x == 0 {
                let mut sum = 0.0f32;
                for unit in 0..units_x {
                    sum += partial[outer * units_x + unit];
                }
                let key = keys.index(keys.first + outer);
                let at = (keys.batch * heads + keys.head) * k_len + key;
                if comptime!(adds) {
                    sum += rank[at];
                }
                rank[at] = sum;
            }
        }
    }
}

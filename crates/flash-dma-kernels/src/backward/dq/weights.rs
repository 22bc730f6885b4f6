//! dS of a key tile of the dq kernel.

use crate::backward::dq::rows::{ExactRows, LaneRows};
use crate::backward::products::Products;
use crate::matrix::args::KeySource;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::dropout::{pair_mask, without_delta};
use crate::matrix::fragment::pack;
use crate::matrix::logit_scale::PairKind;
use crate::matrix::logits::{scores, sees, with_alibi};
use crate::matrix::mask::{SeenPair, is_set};
use crate::matrix::rows::RowPair;
use crate::matrix::softmax::PerRow;
use crate::matrix::stages::Stages;
use crate::matrix::wgmma::product::finish;
use cubecl::prelude::*;

/// The visibility and biases of a key tile's pairs, read while the tensor cores multiply.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TilePairs<N: Size> {
    /// The pairs that a tile plan leaves; on a boundary tile.
    seen: SeenPair,
    /// The pairs' biases, if they have any.
    bias: Vector<f32, N>,
}

#[cube]
impl<N: Size> TilePairs<N> {
    /// Reads them for key tile `tile` and this lane's rows.
    pub(crate) fn read<E: Float>(
        source: &KeySource,
        attended: &AttendedKeys,
        stages: &Stages<E>,
        rows: &RowPair,
        tile: usize,
        boundary: bool,
    ) -> TilePairs<N> {
        let bp = comptime!(attended.own.bp);
        let seen = (attended.mask).words_of_pair::<E>(stages, rows, tile, boundary, bp);
        let mut bias = Vector::<f32, N>::new(0.0f32);
        if comptime!(bp.pattern.has_pair_bias()) {
            let first = attended.first_key(source, tile);
            let scores = source.bias.as_ref().unwrap();
            let (upper, lower, keys) = (&rows.upper, &rows.lower, comptime!(bp.key_tile));
            let (q_len, k_len) = (attended.own.q_len, attended.own.k_len);
            bias = (attended.bias).tile::<N>(scores, upper, lower, first, q_len, k_len, keys);
        }
        TilePairs::<N> { seen, bias }
    }
}

/// A key tile by its place in the list, and whether some row may not see all of it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PlacedTile {
    pub index: usize,
    pub boundary: bool,
}

/// [`gradients`] of a tile, or of any tile by `exact` LSEs.
#[cube]
pub(crate) fn tile_gradients<E: Float, NS: Size, NP: Size>(
    products: &Products<NS>,
    rows: &LaneRows,
    lses: &ExactRows,
    pairs: &TilePairs<NS>,
    stages: &Stages<E>,
    attended: &AttendedKeys,
    tile: &PlacedTile,
    #[comptime] exact: bool,
) -> Vector<u32, NP> {
    let index = tile.index;
    // Separate code for each kind: a branch per element would keep the other instructions from overlapping.
    if comptime!(exact) {
        let kind = comptime!(PairKind::Large);
        gradients::<E, NS, NP>(products, rows, lses, pairs, stages, attended, index, kind)
    } else if tile.boundary {
        let kind = comptime!(PairKind::Boundary);
        gradients::<E, NS, NP>(products, rows, lses, pairs, stages, attended, index, kind)
    } else {
        let kind = comptime!(PairKind::Full);
        gradients::<E, NS, NP>(products, rows, lses, pairs, stages, attended, index, kind)
    }
}

/// dS of key tile `tile`, rounded, as an A operand, from S and from dP, which is in flight while P is computed: zero
/// where a row does not see a key. The LSEs `lses` are read if some are large.
#[cube]
fn gradients<E: Float, NS: Size, NP: Size>(
    products: &Products<NS>,
    rows: &LaneRows,
    lses: &ExactRows,
    pairs: &TilePairs<NS>,
    stages: &Stages<E>,
    attended: &AttendedKeys,
    tile: usize,
    #[comptime] kind: PairKind,
) -> Vector<u32, NP> {
    let bp = comptime!(attended.own.bp);
    let k_len = attended.own.k_len;
    let quad = UNIT_POS_X as usize % 4;
    let boundary = comptime!(kind != PairKind::Full);
    let exact = comptime!(kind == PairKind::Large);
    let p = probabilities::<E, NS>(
        &products.s,
        rows,
        lses,
        pairs,
        stages,
        attended,
        tile,
        exact,
    );
    let dp = finish::<NS>(products.dp, comptime!(bp.key_tile / 2));
    let mut packed = Vector::<u32, NP>::new(0u32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
        let mask = pair_mask(&rows.mask, &stages.columns, tile, 0usize, comptime!(n * 8));
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (dp0, dp1) = (dp.extract(at0), dp.extract(at1));
            let of_pair0 = without_delta(&mask, dp0, rows.upper.delta, e, false);
            let of_pair1 = without_delta(&mask, dp1, rows.lower.delta, e, true);
            let mut ds0 = p.extract(at0) * of_pair0;
            let mut ds1 = p.extract(at1) * of_pair1;
            if comptime!(boundary && bp.pattern.is_planned()) {
                ds0 = select(is_set(pairs.seen.upper, comptime!(n * 8 + e)), ds0, 0.0f32);
                ds1 = select(is_set(pairs.seen.lower, comptime!(n * 8 + e)), ds1, 0.0f32);
            } else if comptime!(boundary) {
                let see0 = sees::<E>(&rows.pair.upper, stages, tile, col, k_len, bp);
                ds0 = select(see0, ds0, 0.0f32);
                let see1 = sees::<E>(&rows.pair.lower, stages, tile, col, k_len, bp);
                ds1 = select(see1, ds1, 0.0f32);
            }
            ds.insert(e, ds0);
            ds.insert(comptime!(2 + e), ds1);
        }
        #[unroll]
        for half in 0..2usize {
            let (x, y) = comptime!((half * 2, half * 2 + 1));
            let pair = pack(ds.extract(x), ds.extract(y), comptime!(bp.element));
            packed.insert(comptime!(n * 2 + half), pair);
        }
    }
    packed
}

/// P, times the softcap's slope; if `exact`, by the LSEs `lses`, which may be large.
#[cube]
fn probabilities<E: Float, NS: Size>(
    s: &Vector<f32, NS>,
    rows: &LaneRows,
    lses: &ExactRows,
    pairs: &TilePairs<NS>,
    stages: &Stages<E>,
    attended: &AttendedKeys,
    tile: usize,
    #[comptime] exact: bool,
) -> Vector<f32, NS> {
    let bp = comptime!(attended.own.bp);
    let logit_scale = &attended.scale;
    let quad = UNIT_POS_X as usize % 4;
    let mut p = Vector::<f32, NS>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let z = if comptime!(bp.pattern.has_pair_bias()) {
                let z = PerRow {
                    upper: pairs.bias.extract(at0),
                    lower: pairs.bias.extract(at1),
                };
                with_alibi::<E>(z, &rows.pair, stages, tile, col, bp)
            } else {
                scores::<E>(&rows.pair, stages, tile, col, bp)
            };
            let (s0, s1) = (s.extract(at0), s.extract(at1));
            let mut p0 = if comptime!(exact) {
                (lses.upper).probability(logit_scale.apply(s0, z.upper))
            } else {
                logit_scale.weight(s0, z.upper, rows.upper.reference)
            };
            let mut p1 = if comptime!(exact) {
                (lses.lower).probability(logit_scale.apply(s1, z.lower))
            } else {
                logit_scale.weight(s1, z.lower, rows.lower.reference)
            };
            if comptime!(bp.softcap) {
                let x0 = logit_scale.apply(s0, 0.0f32);
                let x1 = logit_scale.apply(s1, 0.0f32);
                p0 *= logit_scale.slope(x0);
                p1 *= logit_scale.slope(x1);
            }
            p.insert(at0, p0);
            p.insert(at1, p1);
        }
    }
    p
}

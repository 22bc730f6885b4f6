//! The contribution of one key tile to dQ.

use crate::backward::dq::blueprint::{DQ_BLOCK, DqBlueprint};
use crate::backward::dq::rows::{ExactRows, LaneRows};
use crate::backward::products::Products;
use crate::finite::{NO_NUMBER, exponent_bits};
use crate::matrix::args::SavedRows;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::dropout::{PairMask, pair_mask, without_delta};
use crate::matrix::fragment::pack;
use crate::matrix::logit_scale::{PairKind, exp_of};
use crate::matrix::logits::{scores, sees};
use crate::matrix::mask::{SeenPair, is_set};
use crate::matrix::mma::{LanePlace, Shape, load_a, multiply};
use crate::matrix::softmax::PerRow;
use crate::matrix::stages::Stages;
use crate::pattern::layout::KEY_BLOCK;
use cubecl::prelude::*;

/// The operands of a warp's products, as addresses in shared memory.
#[derive(CubeType)]
pub(crate) struct TileOperands<NA: Size> {
    /// The warp's 16 rows of Q and dO.
    pub q: u32,
    pub o: u32,
    /// The fragments of these rows, one per step of 16 columns; only with `bp.resident`.
    pub q_rows: Sequence<Vector<u32, NA>>,
    pub o_rows: Sequence<Vector<u32, NA>>,
    /// The stages of keys and values.
    pub k: u32,
    pub v: u32,
    /// This lane's contribution to the addresses of fragments.
    pub rows: LanePlace,
    pub columns: LanePlace,
    #[cube(comptime)]
    pub bp: DqBlueprint,
}

/// Adds the contribution of the keys of tile `tile` to dQ (`head_dim / 32` accumulators of 32 columns). Without
/// `boundary` every row selects every key, and no LSE is large; with it, the mask, if there is one, tells which keys a
/// row selects. Returns true if all keys are finite, as far as this warp can tell: non-finite elements of a key add
/// nothing here, which is left to [`mark_pair`](crate::backward::dq::repair::mark_pair).
#[cube]
pub(crate) fn add_tile<E: Float, N: Size, NA: Size>(
    stages: &Stages<E>,
    tile: usize,
    rows: &LaneRows,
    saved: &SavedRows,
    attended: &AttendedKeys,
    operands: &TileOperands<NA>,
    acc: &mut Array<Vector<f32, N>>,
    #[comptime] boundary: bool,
) -> bool {
    let bp = comptime!(operands.bp);
    let tile_bp = comptime!(bp.tile);
    let mask = &attended.mask;
    let key_tile = comptime!(tile_bp.key_tile);
    let row_bytes = comptime!(2 * tile_bp.head_dim as u32);
    let shape = comptime!(bp.products());
    let by_rows = comptime!(Shape {
        transposed: true,
        ..shape
    });
    let by_finite_rows = comptime!(Shape {
        cleaned: true,
        ..by_rows
    });
    let stage = (tile % comptime!(tile_bp.stages) * key_tile) as u32 * row_bytes;
    let mut all_finite = true;
    // The vote stays in the code even where nothing reads its result.
    let mut large = false;
    if comptime!(boundary) {
        large = rows.large();
    }
    // The words of the two rows.
    let mut seen0 = Vector::<u32, Const<2>>::new(0u32);
    let mut seen1 = Vector::<u32, Const<2>>::new(0u32);
    if comptime!(boundary && tile_bp.pattern.is_planned()) {
        let hides = tile >= attended.keys.full_tiles(tile_bp);
        let seen = mask.words_of_pair::<E>(stages, &rows.pair, tile, hides, tile_bp);
        seen0 = seen.upper;
        seen1 = seen.lower;
    }
    let none = ExactRows::none();
    // Not unrolled at boundaries: that code is long and rarely runs.
    #[unroll(!boundary)]
    for block in 0..comptime!(key_tile / DQ_BLOCK) {
        let first = block * DQ_BLOCK;
        let begin = stage + first as u32 * row_bytes;
        let (k_keys, v_keys) = (operands.k + begin, operands.v + begin);
        let products = multiply_keys::<N, NA>(operands, k_keys, v_keys);
        let mut finite = true;
        if comptime!(boundary && tile_bp.pattern.is_planned()) {
            if mask.not_finite {
                finite = keys_are_finite::<N>(&products.s);
            }
        } else if comptime!(boundary) {
            finite = keys_are_finite::<N>(&products.s);
        }
        if comptime!(boundary) {
            all_finite = all_finite && finite;
        }
        let mut upper = seen0;
        let mut lower = seen1;
        if comptime!(boundary && tile_bp.pattern.is_planned() && key_tile == KEY_BLOCK) {
            // The words of this block come first.
            let second = block * DQ_BLOCK >= 32;
            let (upper1, upper0) = (seen0.extract(1usize), seen0.extract(0usize));
            upper.insert(0usize, select(second, upper1, upper0));
            let (lower1, lower0) = (seen1.extract(1usize), seen1.extract(0usize));
            lower.insert(0usize, select(second, lower1, lower0));
        }
        let seen = SeenPair { upper, lower };
        let columns = Columns { tile, first, seen };

        // dS, 16 keys at a time, and dQ += dS K.
        #[unroll]
        for n in 0..comptime!(DQ_BLOCK / 16) {
            let ds = if comptime!(boundary) {
                if large {
                    let (lses, kind) = (rows.exact(saved), comptime!(PairKind::Large));
                    gradients::<E, N, NA>(
                        &products, stages, &columns, rows, &lses, attended, n, kind,
                    )
                } else {
                    let kind = comptime!(PairKind::Boundary);
                    gradients::<E, N, NA>(
                        &products, stages, &columns, rows, &none, attended, n, kind,
                    )
                }
            } else {
                let kind = comptime!(PairKind::Full);
                gradients::<E, N, NA>(&products, stages, &columns, rows, &none, attended, n, kind)
            };
            let keys = k_keys + comptime!(n as u32 * 16 * row_bytes);
            if comptime!(boundary) {
                if finite {
                    add_rows::<N, NA>(acc, ds, keys, operands, by_rows);
                } else {
                    add_rows::<N, NA>(acc, ds, keys, operands, by_finite_rows);
                }
            } else {
                add_rows::<N, NA>(acc, ds, keys, operands, by_rows);
            }
        }
    }
    all_finite
}

/// The products with the keys and values whose rows begin at the addresses `k_keys` and `v_keys`.
#[cube]
fn multiply_keys<N: Size, NA: Size>(
    operands: &TileOperands<NA>,
    k_keys: u32,
    v_keys: u32,
) -> Products<N> {
    let bp = comptime!(operands.bp);
    let shape = comptime!(bp.products());
    let mut s = Vector::<f32, N>::new(0.0f32);
    let mut dp = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for c in 0..comptime!(bp.tile.head_dim / 16) {
        let shape = comptime!(shape.at(16 * c));
        if comptime!(bp.resident) {
            let (q_rows, o_rows) = (operands.q_rows[c], operands.o_rows[c]);
            s = multiply::<N, NA>(s, q_rows, k_keys, &operands.columns, shape);
            dp = multiply::<N, NA>(dp, o_rows, v_keys, &operands.columns, shape);
        } else {
            let q_rows = load_a::<NA>(operands.q, &operands.rows, shape);
            let o_rows = load_a::<NA>(operands.o, &operands.rows, shape);
            s = multiply::<N, NA>(s, q_rows, k_keys, &operands.columns, shape);
            dp = multiply::<N, NA>(dp, o_rows, v_keys, &operands.columns, shape);
        }
    }
    Products::<N> { s, dp }
}

/// A block of columns of a key tile.
#[derive(CubeType, Clone, Copy)]
struct Columns {
    tile: usize,
    first: usize,
    /// The mask words of these columns; on a boundary tile of a plan.
    seen: SeenPair,
}

/// dS of the `n`-th 16 of the columns, rounded, as an A operand: zero where a row does not see a key. The LSEs `lses` are
/// read if some are large.
#[cube]
fn gradients<E: Float, N: Size, NA: Size>(
    products: &Products<N>,
    stages: &Stages<E>,
    columns: &Columns,
    rows: &LaneRows,
    lses: &ExactRows,
    attended: &AttendedKeys,
    #[comptime] n: usize,
    #[comptime] kind: PairKind,
) -> Vector<u32, NA> {
    let bp = comptime!(attended.own.bp);
    let mut ds = Vector::<u32, NA>::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let mut upper = Vector::<f32, Const<2>>::new(0.0f32);
        let mut lower = Vector::<f32, Const<2>>::new(0.0f32);
        let column = comptime!(n * 16 + half * 8);
        let (tile, first) = (columns.tile, columns.first);
        let mask = pair_mask(&rows.mask, &stages.columns, tile, first, column);
        #[unroll]
        for e in 0..2usize {
            let column = comptime!(n * 16 + half * 8 + e);
            let pair = gradient::<E, N>(
                products, stages, columns, rows, lses, &mask, attended, column, kind,
            );
            upper.insert(e, pair.upper);
            lower.insert(e, pair.lower);
        }
        let (x, y) = (upper.extract(0usize), upper.extract(1usize));
        ds.insert(comptime!(half * 2), pack(x, y, comptime!(bp.element)));
        let (x, y) = (lower.extract(0usize), lower.extract(1usize));
        ds.insert(comptime!(half * 2 + 1), pack(x, y, comptime!(bp.element)));
    }
    ds
}

/// dS of this lane's two rows and column `column + 2 quad` of the block.
#[cube]
fn gradient<E: Float, N: Size>(
    products: &Products<N>,
    stages: &Stages<E>,
    columns: &Columns,
    rows: &LaneRows,
    lses: &ExactRows,
    mask: &ComptimeOption<PairMask>,
    attended: &AttendedKeys,
    #[comptime] column: usize,
    #[comptime] kind: PairKind,
) -> PerRow {
    let boundary = comptime!(kind != PairKind::Full);
    let bp = comptime!(attended.own.bp);
    let logit_scale = &attended.scale;
    // The two elements of an accumulator that lie in this column, see `tile_logits`.
    let (at0, at1) = comptime!((column / 8 * 4 + column % 8, column / 8 * 4 + 2 + column % 8));
    let col = columns.first + column + UNIT_POS_X as usize % 4 * 2;
    let z = scores::<E>(&rows.pair, stages, columns.tile, col, bp);
    let (s0, s1) = (products.s.extract(at0), products.s.extract(at1));
    let dp0: f32 = products.dp.extract(at0);
    let dp1: f32 = products.dp.extract(at1);
    let x0 = logit_scale.apply(s0, z.upper);
    let x1 = logit_scale.apply(s1, z.lower);
    let e = comptime!(column % 2);
    let of_pair0 = without_delta(mask, dp0, rows.upper.delta, e, false);
    let of_pair1 = without_delta(mask, dp1, rows.lower.delta, e, true);
    let p0 = if comptime!(kind == PairKind::Large) {
        lses.upper.probability(x0)
    } else {
        exp_of(x0, rows.upper.reference)
    };
    let p1 = if comptime!(kind == PairKind::Large) {
        lses.lower.probability(x1)
    } else {
        exp_of(x1, rows.lower.reference)
    };
    let mut ds0 = p0 * of_pair0;
    let mut ds1 = p1 * of_pair1;
    if comptime!(bp.softcap) {
        // From the product alone: the added number may be infinite, or so large that the logit has lost the product.
        let capped0 = logit_scale.apply(s0, 0.0f32);
        let capped1 = logit_scale.apply(s1, 0.0f32);
        ds0 *= logit_scale.slope(capped0);
        ds1 *= logit_scale.slope(capped1);
    }
    if comptime!(boundary && bp.pattern.is_planned()) {
        ds0 = select(is_set(columns.seen.upper, column), ds0, 0.0f32);
        ds1 = select(is_set(columns.seen.lower, column), ds1, 0.0f32);
    } else if comptime!(boundary) {
        let k_len = attended.own.k_len;
        let see0 = sees::<E>(&rows.pair.upper, stages, columns.tile, col, k_len, bp);
        let see1 = sees::<E>(&rows.pair.lower, stages, columns.tile, col, k_len, bp);
        ds0 = select(see0, ds0, 0.0f32);
        ds1 = select(see1, ds1, 0.0f32);
    }
    PerRow {
        upper: ds0,
        lower: ds1,
    }
}

/// True if all keys of a block are finite: a non-finite element of a key makes its products non-finite in every row.
#[cube]
fn keys_are_finite<N: Size>(products: &Vector<f32, N>) -> bool {
    let mut exponent = 0u32;
    #[unroll]
    for n in 0..comptime!(DQ_BLOCK / 2) {
        exponent = max(exponent, exponent_bits(products.extract(n)));
    }
    plane_all(exponent != NO_NUMBER)
}

/// `acc += ds * K` over the 16 keys whose rows begin at address `keys`.
#[cube]
fn add_rows<N: Size, NA: Size>(
    acc: &mut Array<Vector<f32, N>>,
    ds: Vector<u32, NA>,
    keys: u32,
    operands: &TileOperands<NA>,
    #[comptime] shape: Shape,
) {
    #[unroll]
    for c in 0..comptime!(shape.columns / 32) {
        let shape = comptime!(shape.at(32 * c));
        acc[c] = multiply::<N, NA>(acc[c], ds, keys, &operands.rows, shape);
    }
}

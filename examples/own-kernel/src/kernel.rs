//! The device's side: key tiles stream the queries that attend to them.

use cubecl::prelude::*;
use flash_dma_kernels::internals::tiles::{
    Blueprint, KeyIntervals, NotFinite, Sizes, TileRows, Visibility, VisibilityExpand, load_tile,
    logit, products, shared_rows,
};

// ANCHOR: args
/// Inputs of the kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Args<F: Float, N: Size> {
    /// `[batch, q_heads, q_len, head_dim]`, any strides with a contiguous last axis.
    pub q: OwnedTensor<Vector<F, N>>,
    /// `[batch, kv_heads, k_len, head_dim]`, likewise.
    pub k: OwnedTensor<Vector<F, N>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len]`.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len, 2]`: the positions `[first, end)` that attend to the key.
    pub intervals: OwnedTensor<u32>,
    /// Factor on the products.
    pub scale: f32,
    /// Not read without a softcap.
    pub softcap: f32,
}
// ANCHOR_END: args

// ANCHOR: kernel
/// One cube owns the key tile `CUBE_POS_X` of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: for every query head of
/// the group it streams the queries that may attend to one of its keys, and overwrites its keys' part of `mass`,
/// contiguous `[batch, kv_heads, k_len]`. No other cube writes there, so the result does not depend on their order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn mass_kernel<F: Float, N: Size>(
    args: &Args<F, N>,
    mass: &mut Tensor<f32>,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes {
        q_heads: args.q.shape(1),
        kv_heads: args.k.shape(1),
        q_len: args.q.shape(2),
        k_len: args.k.shape(2),
    };
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let group = sizes.q_heads / sizes.kv_heads;
    let (outer, inner) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let first_key = CUBE_POS_X as usize * outer;
    let key_row = (batch * sizes.kv_heads + kv_head) * sizes.k_len + first_key;

    let mut kept = KeyIntervals::new(true, bp);
    let mut not_finite = NotFinite::new();
    let mut k_rows = shared_rows(outer, bp);
    let mut q_rows = shared_rows(inner, bp);
    let mut lse = Shared::<[f32]>::new_slice(inner);
    // This unit's part of the mass of each of its keys, in registers.
    let mut parts = Array::<f32>::new(comptime!(bp.micro.outer));
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        parts[o] = 0.0f32;
    }

    own_keys::<F, N>(&mut kept, args, key_row, sizes.k_len - first_key, bp);
    let tile = TileRows::new(batch, kv_head, first_key, sizes.k_len);
    load_tile::<F, N>(&args.k, &tile, &mut k_rows, &mut not_finite, outer, bp);
    sync_cube();
    let (first_query, end_query) = kept.queries(&sizes, bp);
    let tiles = (end_query - first_query).div_ceil(inner);
    for step in 0..tiles * group {
        let head = kv_head * group + step / tiles;
        let from = first_query + step % tiles * inner;
        let queries = TileRows::new(batch, head, from, sizes.q_len);
        // The previous tile may still be read.
        sync_cube();
        let row = (batch * sizes.q_heads + head) * sizes.q_len + from;
        load_lse(&args.lse, &mut lse, row, sizes.q_len - from, bp);
        kept.set_queries(&queries, ComptimeOption::new_Some(&lse), &sizes, bp);
        load_tile::<F, N>(&args.q, &queries, &mut q_rows, &mut not_finite, inner, bp);
        sync_cube();
        let mut dots = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
        products(&k_rows, &q_rows, &mut dots, bp);
        add::<F, N>(&mut parts, &dots, &lse, &kept, args, bp);
    }
    store(&parts, mass, key_row, sizes.k_len - first_key, bp);
}
// ANCHOR_END: kernel

/// Sets the intervals and scores of the keys that a cube owns, `keys` from `row` on. All units cooperate; the caller synchronises.
#[cube]
fn own_keys<F: Float, N: Size>(
    kept: &mut KeyIntervals,
    args: &Args<F, N>,
    row: usize,
    keys: usize,
    #[comptime] bp: Blueprint,
) {
    let mut local = UNIT_POS as usize;
    while local < comptime!(bp.outer_rows()) {
        // Past the last key: an interval that holds no position.
        let mut first = i32::new(i32::MAX as i64);
        let mut end = 0i32;
        let mut score = 0.0f32;
        if local < keys {
            first = args.intervals[2 * (row + local)] as i32;
            end = args.intervals[2 * (row + local) + 1] as i32;
            score = args.scores[row + local];
        }
        kept.set_key(local, first, end, score);
        local += comptime!(bp.units());
    }
}

/// Loads the LSEs of a tile of queries; positions past the last query are never selected. All units cooperate, and
/// the unit that sets query `r` of the [`KeyIntervals`] loads row `r`. The caller synchronises.
#[cube]
fn load_lse(
    src: &Tensor<f32>,
    lse: &mut Shared<[f32]>,
    row: usize,
    queries: usize,
    #[comptime] bp: Blueprint,
) {
    let mut local = UNIT_POS as usize;
    while local < comptime!(bp.inner_rows()) {
        lse[local] = 0.0f32;
        if local < queries {
            lse[local] = src[row + local];
        }
        local += comptime!(bp.units());
    }
}

// ANCHOR: add
/// Adds the probabilities of a tile of queries to the parts of a unit's keys; `dots` are the products of the two.
#[cube]
fn add<F: Float, N: Size>(
    parts: &mut Array<f32>,
    dots: &Array<f32>,
    lse: &Shared<[f32]>,
    kept: &KeyIntervals,
    args: &Args<F, N>,
    #[comptime] bp: Blueprint,
) {
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let key = UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
        let mut part = parts[o];
        #[unroll(bp.unroll())]
        for i in 0..comptime!(bp.micro.inner) {
            let query = UNIT_POS_X as usize + i * comptime!(bp.micro.units_x);
            if kept.selected(key, query) {
                let dot = dots[o * comptime!(bp.micro.inner) + i];
                let value = logit(dot, args.scale, args.softcap, bp);
                part += (kept.biased(value, key, query) - lse[query]).exp();
            }
        }
        parts[o] = part;
    }
}
// ANCHOR_END: add

// ANCHOR: store
/// Adds the parts of the units along x and writes the sums of the keys that exist.
#[cube]
fn store(
    parts: &Array<f32>,
    mass: &mut Tensor<f32>,
    row: usize,
    keys: usize,
    #[comptime] bp: Blueprint,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let mut all = Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * units_x));
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        all[(y + o * units_y) * units_x + x] = parts[o];
    }
    sync_cube();
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let local = y + o * units_y;
        if x == 0 && local < keys {
            let mut sum = 0.0f32;
            for unit in 0..units_x {
                sum += all[local * units_x + unit];
            }
            mass[row + local] = sum;
        }
    }
}
// ANCHOR_END: store

//! The device's side: key tiles stream the queries that attend to them.

use cubecl::prelude::*;
use flash_dma_kernels::internals::tiles::{
    Blueprint, KeyIntervals, NotFinite, Row4, Sizes, TileRows, Visibility, VisibilityExpand,
    load_tile, logit, products, shared_rows,
};

// ANCHOR: args
/// The rows that are multiplied.
#[derive(CubeType, CubeLaunch)]
pub struct Rows<F: Float, N: Size> {
    /// `[batch, q_heads, q_len, head_dim]`, any strides with a contiguous last axis.
    pub q: OwnedTensor<Vector<F, N>>,
    /// `[batch, kv_heads, k_len, head_dim]`, likewise.
    pub k: OwnedTensor<Vector<F, N>>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: OwnedTensor<f32>,
}

/// What a selection says of every key.
#[derive(CubeType, CubeLaunch)]
pub struct KeptKeys {
    /// Contiguous `[batch, kv_heads, k_len]`.
    pub scores: OwnedTensor<f32>,
    /// Contiguous `[batch, kv_heads, k_len, 2]`: the positions `[first, end)` that attend to the key.
    pub intervals: OwnedTensor<u32>,
}
// ANCHOR_END: args

/// From products to logits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Scaling {
    /// Factor on the products.
    pub scale: f32,
    /// Not read without a softcap.
    pub softcap: f32,
}

// ANCHOR: kernel
/// One cube owns the key tile `CUBE_POS_X` of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: it streams, for every
/// query head of the group, the queries that may attend to one of its keys, and overwrites its keys' part of `mass`,
/// contiguous `[batch, kv_heads, k_len]`. No other cube writes there, so the result does not depend on their order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn mass_kernel<F: Float, N: Size>(
    rows: &Rows<F, N>,
    keys: &KeptKeys,
    mass: &mut Tensor<f32>,
    scaling: &Scaling,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes {
        q_heads: rows.q.shape(1),
        kv_heads: rows.k.shape(1),
        q_len: rows.q.shape(2),
        k_len: rows.k.shape(2),
    };
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let group = sizes.q_heads / sizes.kv_heads;
    let first_key = CUBE_POS_X as usize * comptime!(bp.outer_rows());
    let key_row = (batch * sizes.kv_heads + kv_head) * sizes.k_len;

    let mut kept = KeyIntervals::new(true, bp);
    let mut not_finite = NotFinite::new();
    let mut k_rows = shared_rows(bp.outer_rows(), bp);
    let mut q_rows = shared_rows(bp.inner_rows(), bp);
    let mut lse = Shared::<[f32]>::new_slice(comptime!(bp.inner_rows()));
    let mut sums = ColumnSums::new(bp);

    own_keys(&mut kept, keys, key_row, first_key, sizes.k_len, bp);
    let tile = TileRows::new(batch, kv_head, first_key, sizes.k_len);
    let outer = comptime!(bp.outer_rows());
    load_tile::<F, N>(&rows.k, &tile, &mut k_rows, &mut not_finite, outer, bp);
    sync_cube();
    let (first_query, end_query) = kept.queries(&sizes, bp);
    let tiles = (end_query - first_query).div_ceil(comptime!(bp.inner_rows()));
    for step in 0..tiles * group {
        let head = kv_head * group + step / tiles;
        let from = first_query + step % tiles * comptime!(bp.inner_rows());
        let queries = TileRows::new(batch, head, from, sizes.q_len);
        // The tile before may still be read.
        sync_cube();
        let lse_row = (batch * sizes.q_heads + head) * sizes.q_len;
        load_lse(&rows.lse, &mut lse, lse_row, from, sizes.q_len, bp);
        let row_lse = ComptimeOption::new_Some(&lse);
        kept.set_queries(&queries, row_lse, &sizes, bp);
        let inner = comptime!(bp.inner_rows());
        load_tile::<F, N>(&rows.q, &queries, &mut q_rows, &mut not_finite, inner, bp);
        sync_cube();
        sums.add(&k_rows, &q_rows, &lse, &kept, scaling, bp);
    }
    sums.store(mass, key_row, first_key, sizes.k_len, bp);
}
// ANCHOR_END: kernel

/// Sets the intervals and scores of the keys that a cube owns. All units cooperate; the caller synchronises.
#[cube]
fn own_keys(
    kept: &mut KeyIntervals,
    keys: &KeptKeys,
    key_row: usize,
    first_key: usize,
    k_len: usize,
    #[comptime] bp: Blueprint,
) {
    let mut local = UNIT_POS as usize;
    while local < comptime!(bp.outer_rows()) {
        let key = first_key + local;
        // Past the last key: an interval that holds no position.
        let mut first = i32::new(i32::MAX as i64);
        let mut end = 0i32;
        let mut score = 0.0f32;
        if key < k_len {
            first = keys.intervals[2 * (key_row + key)] as i32;
            end = keys.intervals[2 * (key_row + key) + 1] as i32;
            score = keys.scores[key_row + key];
        }
        kept.set_key(local, first, end, score);
        local += comptime!(bp.units());
    }
}

/// Loads the LSEs of a tile of queries; the places past the last query are never selected. All units cooperate, and
/// row `r` is loaded by the unit that sets query `r` of the [`KeyIntervals`]. The caller synchronises.
#[cube]
fn load_lse(
    src: &Tensor<f32>,
    lse: &mut Shared<[f32]>,
    lse_row: usize,
    from: usize,
    q_len: usize,
    #[comptime] bp: Blueprint,
) {
    let mut local = UNIT_POS as usize;
    while local < comptime!(bp.inner_rows()) {
        lse[local] = 0.0f32;
        if from + local < q_len {
            lse[local] = src[lse_row + from + local];
        }
        local += comptime!(bp.units());
    }
}

/// The column sums of the keys that a unit owns, in registers.
#[derive(CubeType)]
struct ColumnSums {
    /// Products of the unit's keys and queries.
    products: Array<f32>,
    /// This unit's part of the mass of each of its keys.
    mass: Array<f32>,
}

#[cube]
impl ColumnSums {
    fn new(#[comptime] bp: Blueprint) -> ColumnSums {
        let mut mass = Array::<f32>::new(comptime!(bp.micro.outer));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            mass[o] = 0.0f32;
        }
        ColumnSums {
            products: Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner)),
            mass,
        }
    }

    // ANCHOR: add
    /// Adds the probabilities of a tile of queries, which must have been synchronised.
    fn add(
        &mut self,
        k_rows: &Shared<[Row4]>,
        q_rows: &Shared<[Row4]>,
        lse: &Shared<[f32]>,
        kept: &KeyIntervals,
        scaling: &Scaling,
        #[comptime] bp: Blueprint,
    ) {
        products(k_rows, q_rows, &mut self.products, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let key = UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
            let mut mass = self.mass[o];
            #[unroll(bp.unroll())]
            for i in 0..comptime!(bp.micro.inner) {
                let query = UNIT_POS_X as usize + i * comptime!(bp.micro.units_x);
                if kept.selected(key, query) {
                    let product = self.products[o * comptime!(bp.micro.inner) + i];
                    let value = logit(product, scaling.scale, scaling.softcap, bp);
                    mass += (kept.biased(value, key, query) - lse[query]).exp();
                }
            }
            self.mass[o] = mass;
        }
    }
    // ANCHOR_END: add

    // ANCHOR: store
    /// Adds the parts of the units along x and writes the sums of the keys that exist.
    fn store(
        &self,
        mass: &mut Tensor<f32>,
        key_row: usize,
        first_key: usize,
        k_len: usize,
        #[comptime] bp: Blueprint,
    ) {
        let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
        let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
        let mut parts = Shared::<[f32]>::new_slice(comptime!(bp.outer_rows() * units_x));
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            parts[(y + o * units_y) * units_x + x] = self.mass[o];
        }
        sync_cube();
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let local = y + o * units_y;
            if x == 0 && first_key + local < k_len {
                let mut sum = 0.0f32;
                for unit in 0..units_x {
                    sum += parts[local * units_x + unit];
                }
                mass[key_row + first_key + local] = sum;
            }
        }
    }
    // ANCHOR_END: store
}

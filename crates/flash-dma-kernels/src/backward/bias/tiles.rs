//! The shared memory of the bias-gradient kernel, and the copies to it.

use crate::backward::bias::blueprint::BiasBlueprint;
use crate::matrix::ptx::{shared_address, uniform};
use crate::matrix::wgmma::boxes::{BoxPlace, copy_boxes, copy_words};
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::ring::Ring;
use crate::vectors::Segment;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The shared memory of a cube's warpgroups. Rows past the last query or key are zero.
#[derive(CubeType)]
pub(crate) struct BiasTiles<E: Float> {
    /// `[stages, 2 warpgroups, head_dim / 64, 64 queries, 64]`, panels.
    pub q: Shared<[Segment<E>]>,
    /// Like `q`.
    pub grad_out: Shared<[Segment<E>]>,
    /// `[stages, queries]`: `-log2(e)` times the LSE, and the row sum.
    pub rows: Shared<[Vector<f32, Const<2>>]>,
    /// `[stages, head_dim / 64, 64 keys, 64]`, panels: half a key tile per stage.
    pub k: Shared<[Segment<E>]>,
    /// Like `k`.
    pub v: Shared<[Segment<E>]>,
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct BiasBoxes<E: Float> {
    pub q: TensorMap<E, Tiled>,
    pub grad_out: TensorMap<E, Tiled>,
    pub k: TensorMap<E, Tiled>,
    pub v: TensorMap<E, Tiled>,
    pub rows: TensorMap<f32, Tiled>,
}

/// 16-byte segments of 64 rows.
fn half_segments(bp: BiasBlueprint) -> usize {
    BiasBlueprint::HALF * bp.segments()
}

#[cube]
impl<E: Float> BiasTiles<E> {
    pub(crate) fn new(#[comptime] bp: BiasBlueprint) -> BiasTiles<E> {
        let rows = comptime!(BiasBlueprint::ROW_STAGES * BiasBlueprint::QUERIES);
        let keys = comptime!(BiasBlueprint::KEY_STAGES * half_segments(bp));
        let segments = comptime!(bp.segments());
        BiasTiles::<E> {
            q: Shared::<[Segment<E>]>::new_aligned_slice(rows * segments, 1024usize),
            grad_out: Shared::<[Segment<E>]>::new_aligned_slice(rows * segments, 1024usize),
            rows: Shared::<[Vector<f32, Const<2>>]>::new_aligned_slice(rows, 128usize),
            k: Shared::<[Segment<E>]>::new_aligned_slice(keys, 1024usize),
            v: Shared::<[Segment<E>]>::new_aligned_slice(keys, 1024usize),
        }
    }
}

/// The copies of tiles, and the barriers that signal their arrival.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasCopies {
    /// Addresses of the tensor maps.
    q_map: u64,
    o_map: u64,
    row_map: u64,
    k_map: u64,
    v_map: u64,
    /// Addresses of the first stages: in units of [`Panels`], and for `rows` in bytes.
    q: u32,
    grad_out: u32,
    rows: u32,
    k: u32,
    v: u32,
    /// The rings of query tiles and of half key tiles.
    row_ring: Ring,
    key_ring: Ring,
}

#[cube]
impl BiasCopies {
    /// All units of the cube must call it.
    pub(crate) fn new<E: Float>(tiles: &BiasTiles<E>, boxes: &BiasBoxes<E>) -> BiasCopies {
        let units = comptime!(32 * BiasBlueprint::WARPS);
        BiasCopies {
            q_map: tensor_map_address::<E, Tiled>(&boxes.q),
            o_map: tensor_map_address::<E, Tiled>(&boxes.grad_out),
            row_map: tensor_map_address::<f32, Tiled>(&boxes.rows),
            k_map: tensor_map_address::<E, Tiled>(&boxes.k),
            v_map: tensor_map_address::<E, Tiled>(&boxes.v),
            q: Panels::at::<E>(&tiles.q[0..1]).address,
            grad_out: Panels::at::<E>(&tiles.grad_out[0..1]).address,
            rows: uniform(shared_address(&tiles.rows[0..1]) as usize) as u32,
            k: Panels::at::<E>(&tiles.k[0..1]).address,
            v: Panels::at::<E>(&tiles.v[0..1]).address,
            row_ring: Ring::new(comptime!(BiasBlueprint::ROW_STAGES), 1usize, units),
            key_ring: Ring::new(comptime!(BiasBlueprint::KEY_STAGES), 1usize, units),
        }
    }

    /// The queries of this warpgroup of the `turn`-th query tile.
    pub(crate) fn queries(&self, turn: usize, #[comptime] bp: BiasBlueprint) -> Panels {
        let address = self.q + own_rows(turn, bp);
        Panels { address }
    }

    /// Their output gradients.
    pub(crate) fn grad_out(&self, turn: usize, #[comptime] bp: BiasBlueprint) -> Panels {
        let address = self.grad_out + own_rows(turn, bp);
        Panels { address }
    }

    /// The keys of the `turn`-th half.
    pub(crate) fn keys(&self, turn: usize, #[comptime] bp: BiasBlueprint) -> Panels {
        let address = self.k + key_stage(turn) * comptime!(half_segments(bp) as u32);
        Panels { address }
    }

    /// Their values.
    pub(crate) fn values(&self, turn: usize, #[comptime] bp: BiasBlueprint) -> Panels {
        let address = self.v + key_stage(turn) * comptime!(half_segments(bp) as u32);
        Panels { address }
    }

    /// Waits until the `turn`-th query tile has arrived.
    pub(crate) fn wait_rows(&self, turn: usize) {
        self.row_ring.wait_full(row_stage(turn), turn / ROW_STAGES);
    }

    /// Waits until the `turn`-th half of a key tile has arrived.
    pub(crate) fn wait_keys(&self, turn: usize) {
        let stages = comptime!(BiasBlueprint::KEY_STAGES);
        (self.key_ring).wait_full(key_stage(turn) as usize, turn / stages);
    }

    /// Signals that this unit is done with the `turn`-th query tile.
    pub(crate) fn leave_rows(&self, turn: usize) {
        self.row_ring.arrive_empty(row_stage(turn));
    }

    /// Signals that this unit is done with the `turn`-th half of a key tile.
    pub(crate) fn leave_keys(&self, turn: usize) {
        self.key_ring.arrive_empty(key_stage(turn) as usize);
    }

    /// Starts the copies of the `turn`-th query tile, from query `first` on, once its stage is empty. Only one unit
    /// calls it.
    pub(crate) fn fill_rows(
        &self,
        turn: usize,
        batch: usize,
        head: usize,
        first: usize,
        #[comptime] bp: BiasBlueprint,
    ) {
        let stage = row_stage(turn);
        if turn >= ROW_STAGES {
            self.row_ring.wait_empty(stage, turn / ROW_STAGES - 1);
        }
        let ring = &self.row_ring;
        let queries = comptime!(BiasBlueprint::QUERIES);
        let bytes = comptime!((BiasBlueprint::QUERIES * (4 * bp.head_dim + 8)) as u32);
        ring.arrive_expecting(stage, bytes);
        let word = 2 * first;
        let to = self.rows + (stage * queries * 8) as u32;
        copy_words(self.row_map, batch, head, word, to, ring, stage);
        #[unroll]
        for group in 0..2usize {
            let behind = (stage * comptime!(2 * half_segments(bp))) as u32
                + comptime!((group * half_segments(bp)) as u32);
            let row = first + comptime!(group * BiasBlueprint::HALF);
            let q = self.q + behind;
            copy_half(self.q_map, batch, head, row, q, ring, stage, bp);
            let o = self.grad_out + behind;
            copy_half(self.o_map, batch, head, row, o, ring, stage, bp);
        }
    }

    /// Starts the copies of the `turn`-th half of a key tile, from `first` on, once its stage is empty. Only one unit
    /// calls it.
    pub(crate) fn fill_keys(
        &self,
        turn: usize,
        batch: usize,
        kv_head: usize,
        first: usize,
        #[comptime] bp: BiasBlueprint,
    ) {
        let stage = key_stage(turn) as usize;
        let stages = comptime!(BiasBlueprint::KEY_STAGES);
        if turn >= stages {
            self.key_ring.wait_empty(stage, turn / stages - 1);
        }
        let ring = &self.key_ring;
        let bytes = comptime!((BiasBlueprint::HALF * 4 * bp.head_dim) as u32);
        ring.arrive_expecting(stage, bytes);
        let k = self.keys(turn, bp).address;
        copy_half(self.k_map, batch, kv_head, first, k, ring, stage, bp);
        let v = self.values(turn, bp).address;
        copy_half(self.v_map, batch, kv_head, first, v, ring, stage, bp);
    }
}

/// Starts the copy of 64 rows from `row` on to `address`, as [`copy_boxes`].
#[cube]
fn copy_half(
    map: u64,
    batch: usize,
    head: usize,
    row: usize,
    address: u32,
    ring: &Ring,
    stage: usize,
    #[comptime] bp: BiasBlueprint,
) {
    let (rows, columns) = comptime!((BiasBlueprint::HALF, bp.head_dim));
    let to = Panels { address };
    let from = BoxPlace { batch, head, row };
    copy_boxes(map, &from, &to, ring, stage, rows, columns);
}

const ROW_STAGES: usize = BiasBlueprint::ROW_STAGES;

/// The stage of the `turn`-th query tile.
#[cube]
pub(crate) fn row_stage(turn: usize) -> usize {
    turn % ROW_STAGES
}

#[cube]
fn key_stage(turn: usize) -> u32 {
    turn as u32 % comptime!(BiasBlueprint::KEY_STAGES as u32)
}

/// Offset at which this warpgroup's rows of the `turn`-th query tile begin, in segments.
#[cube]
fn own_rows(turn: usize, #[comptime] bp: BiasBlueprint) -> u32 {
    let group = uniform(UNIT_POS_Y as usize / 4) as u32;
    (row_stage(turn) as u32 * 2 + group) * comptime!(half_segments(bp) as u32)
}

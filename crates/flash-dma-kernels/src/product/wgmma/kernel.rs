//! The kernel for products on `wgmma`.

use crate::matrix::ptx::{uniform, value};
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::ring::Ring;
use crate::product::operands::Major;
use crate::product::wgmma::blueprint::{Blueprint, CONSUMERS, DEPTH, Tile};
use crate::product::wgmma::instruction::multiply_add;
use crate::vectors::Segment;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub rows: u32,
    pub columns: u32,
    /// Tiles of [`DEPTH`] terms that cover `k`.
    pub depth_tiles: u32,
    pub part_tiles: u32,
}

/// `A B`, or with several parts of the sums the result of each part.
///
/// | tensor | shape | content |
/// |---|---|---|
/// | `a`, `b` | `[m, k]` and `[k, n]` | boxes of 64 elements along their contiguous axis; zeros past the last |
/// | `out` | `[parts, m, n]`, contiguous | overwritten |
///
/// A cube owns a tile of the result, `[128, n]`, of a part: cube x is the tile's column, y its row, z the part, so that
/// the cubes of a wave share rows of A. Its last warp copies, up to `stages` tiles of A and B ahead of the two
/// warpgroups, each of which multiplies 64 rows; while one of them starts over, the tensor cores work for the other.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn product_wgmma_kernel<E: Float, O: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    out: &mut [Vector<O, Const<2>>],
    extent: Extent,
    #[comptime] bp: Blueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size!(N) = comptime!(bp.tile.columns() / 2);
    let (a_segments, b_segments) = comptime!((bp.a_segments(), bp.b_segments()));
    let a_tiles = Shared::<[Segment<E>]>::new_aligned_slice(
        comptime!(bp.stages() * bp.a_segments()),
        1024usize,
    );
    let b_tiles = Shared::<[Segment<E>]>::new_aligned_slice(
        comptime!(bp.stages() * bp.b_segments()),
        1024usize,
    );
    let a_panels = Panels::at::<E>(&a_tiles[0..1]);
    let b_panels = Panels::at::<E>(&b_tiles[0..1]);
    let ring = Ring::new(comptime!(bp.stages()), 1usize, comptime!(4 * CONSUMERS));

    let row = CUBE_POS_Y as usize * Tile::ROWS;
    let column = CUBE_POS_X as usize * comptime!(bp.tile.columns());
    let first = CUBE_POS_Z * extent.part_tiles;
    let tiles = min(extent.part_tiles, extent.depth_tiles - first) as usize;
    let warp = uniform(UNIT_POS_Y as usize);
    if warp == comptime!(4 * CONSUMERS) {
        if UNIT_POS_X == 0 {
            let (a_map, b_map) = (
                tensor_map_address::<E, Tiled>(a),
                tensor_map_address::<E, Tiled>(b),
            );
            for tile in 0..tiles {
                let stage = tile % comptime!(bp.stages());
                if tile >= comptime!(bp.stages()) {
                    ring.wait_empty(stage, tile / comptime!(bp.stages()) - 1);
                }
                ring.arrive_expecting(stage, comptime!(bp.stage_bytes() as u32));
                let k = (first as usize + tile) * DEPTH;
                let to = a_panels.behind(stage * a_segments);
                let along_k = comptime!(bp.a == Major::Row);
                copy_tile(a_map, k, row, &to, &ring, stage, along_k, Tile::ROWS);
                let to = b_panels.behind(stage * b_segments);
                let (along_k, columns) = comptime!((bp.b == Major::Column, bp.tile.columns()));
                copy_tile(b_map, k, column, &to, &ring, stage, along_k, columns);
            }
        }
    } else {
        let group = warp / 4;
        let own_a = a_panels.behind(group * comptime!(bp.a_segments() / CONSUMERS));
        let mut acc = Vector::<f32, N>::new(0.0f32);
        for tile in 0..tiles {
            let stage = tile % comptime!(bp.stages());
            ring.wait_full(stage, tile / comptime!(bp.stages()));
            acc = multiply_add::<N>(
                acc,
                &own_a.behind(stage * a_segments),
                &b_panels.behind(stage * b_segments),
                bp,
            );
            if UNIT_POS_X == 0 {
                ring.arrive_empty(stage);
            }
        }
        let lane = UNIT_POS_X as usize;
        let upper = row + warp * 16 + lane / 4;
        write_row::<O, N>(out, &acc, upper, column, &extent, 0usize, bp);
        write_row::<O, N>(out, &acc, upper + 8, column, &extent, 1usize, bp);
    }
}

/// Starts the copies of a tile of `across` elements across and [`DEPTH`] along k to its panels: one box if its rows run
/// along k, otherwise one for every 64 elements across.
#[cube]
fn copy_tile(
    map: u64,
    k: usize,
    begin: usize,
    to: &Panels,
    ring: &Ring,
    stage: usize,
    #[comptime] along_k: bool,
    #[comptime] across: usize,
) {
    if comptime!(along_k) {
        copy_box(map, k, begin, 16 * to.address, ring.full(stage));
    } else {
        #[unroll]
        for panel in 0..comptime!(across / 64) {
            let place = 16 * (to.address + comptime!((panel * DEPTH * 64 / 8) as u32));
            let column = begin + comptime!(64 * panel);
            copy_box(map, column, k, place, ring.full(stage));
        }
    }
}

/// Starts the copy of the box at `[row, column]` to `place` in shared memory, which `barrier` tracks.
#[cube]
fn copy_box(map: u64, column: usize, row: usize, place: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}], [{}];",
        in(_) value::<u32>(place),
        in(_) value::<u64>(map),
        in(_) value::<u32>(column as u32),
        in(_) value::<u32>(row as u32),
        in(_) value::<u32>(barrier),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Writes this lane's elements of one of its two rows: pairs of columns, of which there is an even number.
#[cube]
fn write_row<O: Float, N: Size>(
    out: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    row: usize,
    column: usize,
    extent: &Extent,
    #[comptime] lower: usize,
    #[comptime] bp: Blueprint,
) {
    let (rows, columns) = (extent.rows as usize, extent.columns as usize);
    if row < rows {
        let first = column + UNIT_POS_X as usize % 4 * 2;
        let at = ((CUBE_POS_Z as usize * rows + row) * columns + first) / 2;
        #[unroll]
        for c in 0..comptime!(bp.tile.columns() / 8) {
            if first + comptime!(8 * c) < columns {
                let mut pair =
                    Vector::<f32, Const<2>>::new(acc.extract(comptime!(4 * c + 2 * lower)));
                pair.insert(1usize, acc.extract(comptime!(4 * c + 2 * lower + 1)));
                out[at + comptime!(4 * c)] = Vector::cast_from(pair);
            }
        }
    }
}

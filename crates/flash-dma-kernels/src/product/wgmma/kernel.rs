//! The kernel for products on `wgmma`.

use crate::matrix::blueprint::RowStores;
use crate::matrix::ptx::{global_address, uniform, value};
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::ring::Ring;
use crate::matrix::wgmma::rows::{collect_segment, store_segment};
use crate::product::operands::Major;
use crate::product::wgmma::blueprint::{Blueprint, CONSUMERS, DEPTH, LAG, Tile};
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
    /// Tiles of the result side by side, and one below the other.
    pub tile_columns: u32,
    pub tile_rows: u32,
    pub parts: u32,
}

/// A tile of the result of one part of the sums.
#[derive(CubeType, Clone, Copy)]
struct Place {
    row: usize,
    column: usize,
    part: usize,
    /// The first of the [`DEPTH`]-term tiles of the part, and how many there are.
    first: usize,
    depth: usize,
}

#[cube]
impl Place {
    /// Tiles are counted along the columns, then the rows, then the parts, so that neighbours share rows of A.
    fn new(tile: u32, extent: &Extent, #[comptime] bp: Blueprint) -> Place {
        let part = tile / (extent.tile_columns * extent.tile_rows);
        let row = tile / extent.tile_columns % extent.tile_rows;
        let first = part * extent.part_tiles;
        Place {
            row: row as usize * Tile::ROWS,
            column: (tile % extent.tile_columns) as usize * comptime!(bp.tile.columns()),
            part: part as usize,
            first: first as usize,
            depth: min(extent.part_tiles, extent.depth_tiles - first) as usize,
        }
    }
}

/// `A B`, or with several parts of the sums the result of each part.
///
/// | tensor | shape | content |
/// |---|---|---|
/// | `a`, `b` | `[m, k]` and `[k, n]` | boxes of 64 elements along their contiguous axis; zeros past the last |
/// | `out` | `[parts, m, n]`, contiguous | overwritten |
///
/// A cube computes every `CUBE_COUNT_X`-th tile of the result, `[128, n]` of a part. Its last warp copies, up to `stages`
/// tiles of A and B ahead of the two warpgroups, each of which multiplies 64 rows. The second is [`LAG`] stages behind the
/// first: while one of them writes its rows or starts over, the tensor cores work for the other.
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

    let tiles = extent.tile_columns * extent.tile_rows * extent.parts;
    let stages = comptime!(bp.stages());
    let warp = uniform(UNIT_POS_Y as usize);
    let mut tile = CUBE_POS_X;
    // Stages that this unit has filled or used.
    let mut done = 0usize;
    if warp == comptime!(4 * CONSUMERS) {
        if UNIT_POS_X == 0 {
            let (a_map, b_map) = (
                tensor_map_address::<E, Tiled>(a),
                tensor_map_address::<E, Tiled>(b),
            );
            while tile < tiles {
                let place = Place::new(tile, &extent, bp);
                for depth in 0..place.depth {
                    let stage = done % stages;
                    if done >= stages {
                        ring.wait_empty(stage, done / stages - 1);
                    }
                    ring.arrive_expecting(stage, comptime!(bp.stage_bytes() as u32));
                    let k = (place.first + depth) * DEPTH;
                    let to = a_panels.behind(stage * a_segments);
                    let along_k = comptime!(bp.a == Major::Row);
                    copy_tile(a_map, k, place.row, &to, &ring, stage, along_k, Tile::ROWS);
                    let to = b_panels.behind(stage * b_segments);
                    let (along_k, columns) = comptime!((bp.b == Major::Column, bp.tile.columns()));
                    copy_tile(b_map, k, place.column, &to, &ring, stage, along_k, columns);
                    done += 1;
                }
                tile += CUBE_COUNT_X;
            }
        }
    } else {
        let group = warp / 4;
        let own_a = a_panels.behind(group * comptime!(bp.a_segments() / CONSUMERS));
        if group == 1 {
            wait_to_start();
        }
        // The first tile may have fewer stages.
        let lag = min(LAG, Place::new(tile, &extent, bp).depth);
        while tile < tiles {
            let place = Place::new(tile, &extent, bp);
            let mut acc = Vector::<f32, N>::new(0.0f32);
            for _ in 0..place.depth {
                let stage = done % stages;
                ring.wait_full(stage, done / stages);
                acc = multiply_add::<N>(
                    acc,
                    &own_a.behind(stage * a_segments),
                    &b_panels.behind(stage * b_segments),
                    bp,
                );
                if UNIT_POS_X == 0 {
                    ring.arrive_empty(stage);
                }
                done += 1;
                if group == 0 && done == lag {
                    start_second();
                }
            }
            let upper = place.row + warp * 16 + UNIT_POS_X as usize / 4;
            write_row::<O, N>(out, &acc, upper, &place, &extent, 0usize, bp);
            write_row::<O, N>(out, &acc, upper + 8, &place, &extent, 1usize, bp);
            tile += CUBE_COUNT_X;
        }
    }
}

/// Sets the warpgroups out of step: the second begins once the first calls [`start_second`].
#[cube]
fn wait_to_start() {
    gpu_asm!("bar.sync 1, 256;", options(explicit_mem, reads_address_space shared, writes_address_space shared));
}

/// Ends [`wait_to_start`].
#[cube]
fn start_second() {
    gpu_asm!("bar.arrive 1, 256;", options(explicit_mem, reads_address_space shared, writes_address_space shared));
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

/// Writes one of the two rows of which this lane holds elements, in every fourth pair of columns.
#[cube]
fn write_row<O: Float, N: Size>(
    out: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    row: usize,
    place: &Place,
    extent: &Extent,
    #[comptime] lower: usize,
    #[comptime] bp: Blueprint,
) {
    let (rows, columns) = (extent.rows as usize, extent.columns as usize);
    let quad = UNIT_POS_X as usize % 4;
    let begin = (place.part * rows + row) * columns;
    match comptime!(bp.stores) {
        RowStores::Pairs => {
            if row < rows {
                let first = place.column + quad * 2;
                #[unroll]
                for c in 0..comptime!(bp.tile.columns() / 8) {
                    if first + comptime!(8 * c) < columns {
                        out[(begin + first) / 2 + comptime!(4 * c)] =
                            Vector::cast_from(pair::<N>(acc, c, lower));
                    }
                }
            }
        }
        RowStores::Segments => {
            let first = place.column + quad * 8;
            #[unroll]
            for four in 0..comptime!(bp.tile.columns() / 32) {
                let mut words = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    let rounded: Vector<O, Const<2>> =
                        Vector::cast_from(pair::<N>(acc, comptime!(4 * four + i), lower));
                    words[i] = u32::reinterpret(rounded);
                }
                collect_segment(&mut words);
                if row < rows && first + comptime!(32 * four) < columns {
                    let at = (begin + first) / 2 + comptime!(16 * four);
                    store_segment(global_address(&out[at..at + 1]), &words);
                }
            }
        }
    }
}

/// This lane's pair of the `c`-th eight columns.
#[cube]
fn pair<N: Size>(
    acc: &Vector<f32, N>,
    #[comptime] c: usize,
    #[comptime] lower: usize,
) -> Vector<f32, Const<2>> {
    let mut pair = Vector::<f32, Const<2>>::new(acc.extract(comptime!(4 * c + 2 * lower)));
    pair.insert(1usize, acc.extract(comptime!(4 * c + 2 * lower + 1)));
    pair
}

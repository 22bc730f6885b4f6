//! Shared-memory tiles as `wgmma` reads them.

use crate::matrix::ptx::{shared_address, uniform};
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// Elements a row of the panels that a tile of `columns` columns, a multiple of 16, consists of.
pub(crate) fn panel_width(columns: usize) -> usize {
    let divides = |width: &usize| columns.is_multiple_of(*width);
    *[64, 32].iter().find(|width| divides(width)).unwrap_or(&16)
}

/// Where chunk `col` of row `row` lies in a tile of `rows` rows of `chunks` chunks, in chunks.
#[cube]
pub(crate) fn panel_place(
    row: usize,
    col: usize,
    #[comptime] rows: usize,
    #[comptime] chunks: usize,
) -> usize {
    // Chunks of a panel's row; rows of 128 bytes are permuted row by row, shorter ones by those that fill as much.
    let width = comptime!(panel_width(chunks * 8) / 8);
    let turn = row / comptime!(8 / width) % width;
    col / width * comptime!(rows * width) + row * width + ((col % width) ^ turn)
}

/// Where chunk `col` of row `row` lies in the operands of several warpgroups: one tile of 64 rows each.
#[cube]
pub(crate) fn group_place(row: usize, col: usize, #[comptime] chunks: usize) -> usize {
    row / 64 * comptime!(64 * chunks) + panel_place(row % 64, col, 64usize, chunks)
}

/// Makes what this unit has written to shared memory, or was told of by a barrier, visible to the products that it
/// starts, and behind the next barrier to those of all warps. Copies must have landed.
#[cube]
pub(crate) fn publish() {
    gpu_asm!("fence.proxy.async.shared::cta;", options(explicit_mem, reads_address_space shared, writes_address_space shared));
}

/// The shared-memory address of a tile, in the units of descriptors: 16 bytes.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Panels {
    pub address: u32,
}

#[cube]
impl Panels {
    /// The tile that begins at the first of `chunks`.
    pub(crate) fn at<E: Float>(chunks: &[Chunk<E>]) -> Panels {
        // Of a warpgroup's own tile, which the compiler would not know to be one for all lanes.
        Panels {
            address: uniform((shared_address(chunks) / 16) as usize) as u32,
        }
    }

    /// The tile that begins `chunks` chunks further on.
    pub(crate) fn behind(&self, chunks: usize) -> Panels {
        Panels {
            address: self.address + chunks as u32,
        }
    }
}

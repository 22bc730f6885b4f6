//! The layout of shared-memory tiles for `wgmma`.

use crate::matrix::ptx::{shared_address, uniform};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// Elements per row of the panels that a tile of `columns` columns, a multiple of 16, consists of.
pub(crate) fn panel_width(columns: usize) -> usize {
    let divides = |width: &usize| columns.is_multiple_of(*width);
    *[64, 32].iter().find(|width| divides(width)).unwrap_or(&16)
}

/// Offset of segment `col` of row `row` in a tile of `rows` rows of `segments` segments, in segments.
#[cube]
pub(crate) fn panel_place(
    row: usize,
    col: usize,
    #[comptime] rows: usize,
    #[comptime] segments: usize,
) -> usize {
    // Segments of a panel's row; rows of 128 bytes are permuted row by row, shorter rows in groups that fill 128 bytes.
    let width = comptime!(panel_width(segments * 8) / 8);
    let turn = row / comptime!(8 / width) % width;
    col / width * comptime!(rows * width) + row * width + ((col % width) ^ turn)
}

/// Offset of segment `col` of row `row` in the operands of several warpgroups: one tile of 64 rows each.
#[cube]
pub(crate) fn group_place(row: usize, col: usize, #[comptime] segments: usize) -> usize {
    row / 64 * comptime!(64 * segments) + panel_place(row % 64, col, 64usize, segments)
}

/// Makes this unit's writes to shared memory, and those that a barrier made visible to it, visible to the products that
/// it starts and, after the next barrier, to the products of all warps. Copies must have landed.
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
    /// The tile that begins at the first of `segments`.
    pub(crate) fn at<E: Float>(segments: &[Segment<E>]) -> Panels {
        // The address of a warpgroup's own tile, which the compiler could not know to be uniform.
        Panels {
            address: uniform((shared_address(segments) / 16) as usize) as u32,
        }
    }

    /// The tile that begins `segments` segments further on.
    pub(crate) fn behind(&self, segments: usize) -> Panels {
        Panels {
            address: self.address + segments as u32,
        }
    }
}

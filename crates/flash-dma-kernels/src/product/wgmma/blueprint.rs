//! The compile-time configuration of the kernel.

use crate::matrix::blueprint::RowStores;
use crate::product::operands::Major;
use flash_dma_problem::ElementType;

/// Terms of a sum per stage: a row of 128 bytes.
pub(crate) const DEPTH: usize = 64;

/// Warpgroups that multiply.
pub(crate) const CONSUMERS: usize = 2;

/// Stages by which the second warpgroup begins later than the first.
pub(crate) const LAG: usize = 2;

/// The part of the result that a cube computes at a time: 128 rows of this many columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 128 columns; two cubes share a multiprocessor.
    Columns128,
    /// 256 columns: the fewest bytes read per product.
    Columns256,
}

impl Tile {
    /// Both tiles.
    pub const ALL: [Self; 2] = [Self::Columns128, Self::Columns256];

    /// Rows of either tile.
    pub const ROWS: usize = 64 * CONSUMERS;

    /// Number of columns.
    #[must_use]
    pub const fn columns(self) -> usize {
        match self {
            Self::Columns128 => 128,
            Self::Columns256 => 256,
        }
    }

    /// Number of cubes for which a multiprocessor has registers and shared memory.
    pub(crate) const fn cubes_per_processor(self) -> u32 {
        match self {
            Self::Columns128 => 2,
            Self::Columns256 => 1,
        }
    }

    pub(crate) fn for_columns(n: usize) -> Self {
        if n > 128 {
            Self::Columns256
        } else {
            Self::Columns128
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    pub element: ElementType,
    pub tile: Tile,
    /// The layout of A `[m, k]`.
    pub a: Major,
    /// The layout of B `[k, n]`.
    pub b: Major,
    /// How the result is written.
    pub stores: RowStores,
}

impl Blueprint {
    /// Tiles of A and B that are copied ahead, plus the one in use.
    pub(crate) fn stages(self) -> usize {
        match self.tile {
            Tile::Columns128 => 3,
            Tile::Columns256 => 4,
        }
    }

    pub(crate) fn a_segments(self) -> usize {
        Tile::ROWS * DEPTH / 8
    }

    pub(crate) fn b_segments(self) -> usize {
        self.tile.columns() * DEPTH / 8
    }

    pub(crate) fn stage_bytes(self) -> usize {
        16 * (self.a_segments() + self.b_segments())
    }
}

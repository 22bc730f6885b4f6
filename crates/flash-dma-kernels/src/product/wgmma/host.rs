//! The compile-time configuration of the kernel, and its launch.

use super::kernel::{ExtentLaunch, product_wgmma_kernel};
use crate::host::check::{address_type, elem_type};
use crate::matrix::blueprint::has_wgmma;
use crate::product::operands::{Major, Operands, Output, Sizes, major, transposed};
use crate::product::parts::Division;
use cubecl::client::Client;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// Terms of a sum per stage: a row of 128 bytes.
pub(crate) const DEPTH: usize = 64;

/// Warpgroups that multiply.
pub(crate) const CONSUMERS: usize = 2;

/// The part of the result that a cube owns: 128 rows of this many columns.
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

/// The reason why the kernel does not multiply these operands on this device; `None` if it does.
pub(crate) fn refusal(properties: &DeviceProperties, operands: &Operands) -> Option<&'static str> {
    let Sizes { m, n, k } = operands.sizes();
    // The LLVM generator, which has no inline PTX, has no asynchronous copies either.
    if !has_wgmma(properties) || !properties.features.copy_async {
        Some("the device has no wgmma")
    } else if operands.element == ElementType::F32 {
        Some("wgmma multiplies 16-bit types")
    } else if ![m, n, k].iter().all(|size| (8..=1 << 30).contains(size)) {
        Some("a size is below 8 or past 2^30")
    } else if m.div_ceil(Tile::ROWS) > properties.hardware.max_cube_count.1 as usize {
        Some("there are too many rows")
    } else if n % 2 == 1 {
        Some("the number of columns is odd")
    } else if !operands.takes_boxes() {
        Some("boxes need rows that begin at multiples of 16 bytes")
    } else {
        None
    }
}

pub(crate) struct Plan<'a> {
    operands: &'a Operands,
    blueprint: Blueprint,
    division: Division,
}

impl<'a> Plan<'a> {
    /// The plan with at most `parts` parts, or the reason why the product is not served.
    pub(crate) fn new(
        client: &Client,
        operands: &'a Operands,
        tile: Tile,
        parts: usize,
    ) -> Result<Self, String> {
        if let Some(reason) = refusal(client.properties(), operands) {
            return Err(reason.into());
        }
        let major = |tensor| major(tensor).expect("boxes have contiguous rows or columns");
        let blueprint = Blueprint {
            element: operands.element,
            tile,
            a: major(&operands.a),
            b: major(&operands.b),
        };
        Ok(Self {
            operands,
            blueprint,
            division: Division::new(operands.sizes().k, parts),
        })
    }

    /// The parts that [`launch`](Self::launch) writes.
    pub(crate) fn parts(&self) -> usize {
        self.division.count()
    }

    /// Writes every part to `out`, `[parts, m, n]` or for one part `[m, n]`, contiguous.
    pub(crate) fn launch(&self, client: &Client, out: Output) {
        let (bp, Sizes { m, n, k }) = (self.blueprint, self.operands.sizes());
        let cubes = [
            n.div_ceil(bp.tile.columns()),
            m.div_ceil(Tile::ROWS),
            self.parts(),
        ];
        let [x, y, z] = cubes.map(|count| count as u32);
        let a = match bp.a {
            Major::Row => boxes(&self.operands.a, bp.element, Tile::ROWS),
            Major::Column => boxes(&transposed(&self.operands.a), bp.element, DEPTH),
        };
        let b = match bp.b {
            Major::Row => boxes(&self.operands.b, bp.element, DEPTH),
            Major::Column => boxes(&transposed(&self.operands.b), bp.element, bp.tile.columns()),
        };
        let extent = ExtentLaunch::new(
            m as u32,
            n as u32,
            k.div_ceil(DEPTH) as u32,
            self.division.length.div_ceil(DEPTH) as u32,
        );
        // SAFETY: the tensor maps bound the reads; rows and columns past the last are not written, and `out` holds
        // `parts` results, which the caller allocated or checked.
        unsafe {
            product_wgmma_kernel::launch_unchecked(
                client,
                CubeCount::Static(x, y, z),
                CubeDim::new_2d(32, 4 * CONSUMERS as u32 + 1),
                address_type(&[out.tensor], out.element.size()),
                a,
                b,
                out.tensor.clone().into_buffer_arg(),
                extent,
                bp,
                elem_type(bp.element),
                elem_type(out.element),
            );
        }
    }
}

/// The tensor map of a matrix with contiguous rows, in boxes of `rows` rows of 64 elements.
fn boxes(tensor: &TensorBinding, element: ElementType, rows: usize) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs {
        tile_size: [rows, 64].into(),
    };
    TensorMapArg::new(boxes, tensor.clone().into_tensor_arg(), elem_type(element))
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

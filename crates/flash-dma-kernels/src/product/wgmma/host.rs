//! The products that the kernel serves, and its launch.

use crate::host::check::{SEGMENT_BYTES, address_type, begins_at, elem_type};
use crate::matrix::blueprint::{RowStores, has_wgmma};
use crate::product::operands::{Major, Operands, Output, Sizes, major, transposed};
use crate::product::parts::Division;
use crate::product::wgmma::blueprint::{Blueprint, CONSUMERS, DEPTH, Tile};
use crate::product::wgmma::kernel::{ExtentLaunch, product_wgmma_kernel};
use cubecl::client::Client;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

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
    tile: Tile,
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
        Ok(Self {
            operands,
            tile,
            division: Division::new(operands.sizes().k, parts),
        })
    }

    /// The parts that [`launch`](Self::launch) writes.
    pub(crate) fn parts(&self) -> usize {
        self.division.count()
    }

    fn blueprint(&self, out: Output) -> Blueprint {
        let major = |tensor| major(tensor).expect("boxes have contiguous rows or columns");
        let segments = out.element.size() == 2
            && self.operands.sizes().n.is_multiple_of(8)
            && begins_at(out.tensor, SEGMENT_BYTES);
        Blueprint {
            element: self.operands.element,
            tile: self.tile,
            a: major(&self.operands.a),
            b: major(&self.operands.b),
            stores: RowStores::in_segments(segments),
        }
    }

    /// Writes every part to `out`, `[parts, m, n]` or for one part `[m, n]`, contiguous.
    pub(crate) fn launch(&self, client: &Client, out: Output) {
        let (bp, Sizes { m, n, k }) = (self.blueprint(out), self.operands.sizes());
        let tiles = [
            n.div_ceil(bp.tile.columns()),
            m.div_ceil(Tile::ROWS),
            self.parts(),
        ];
        let [columns, rows, parts] = tiles.map(|count| count as u32);
        let all = columns * rows * parts;
        let cubes = (client.properties().hardware.num_streaming_multiprocessors)
            .map_or(all, |count| all.min(count * bp.tile.cubes_per_processor()));
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
            columns,
            rows,
            parts,
        );
        // SAFETY: the tensor maps bound the reads; rows and columns past the last are not written, and `out` holds
        // `parts` results, which the caller allocated or checked.
        unsafe {
            product_wgmma_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes, 1, 1),
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

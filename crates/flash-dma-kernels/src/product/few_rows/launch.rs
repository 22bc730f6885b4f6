//! The products that the kernel serves, and its launch.

use super::blueprint::{Blueprint, Task};
use super::kernel::{ExtentLaunch, product_few_rows_kernel};
use crate::host::check::{SEGMENT_BYTES, address_type, elem_type, reads_in};
use crate::product::operands::{Major, Operands, Output, Sizes, major, transposed};
use cubecl::client::Client;
use cubecl::prelude::*;

pub(crate) struct Plan<'a> {
    operands: &'a Operands,
    blueprint: Blueprint,
    cubes: [u32; 2],
}

impl<'a> Plan<'a> {
    /// The plan for canonical operands that are not empty, or the reason why they are not served.
    pub(crate) fn new(client: &Client, operands: &'a Operands) -> Result<Self, String> {
        let (size, Sizes { m, n, k }) = (operands.element.size(), operands.sizes());
        if major(&operands.a) != Some(Major::Row) {
            return Err("the rows of the left factor are not contiguous".into());
        }
        let b = major(&operands.b).ok_or("no axis of the right factor is contiguous")?;
        let vectors = |most: usize| {
            let sizes = client.io_optimized_vector_sizes(size);
            sizes.filter(move |n| n * size <= SEGMENT_BYTES && *n <= most)
        };
        let (length, rows) = match b {
            Major::Row => (n, operands.b.clone()),
            Major::Column => (k, transposed(&operands.b)),
        };
        let b_vector = vectors(length).find(|&n| reads_in(&rows, n, size));
        let task = Task {
            b,
            b_vector: b_vector.unwrap_or(1),
            m,
            n,
            size,
        };
        let mut blueprint = Blueprint::choose(client, &task);
        if k.is_multiple_of(blueprint.terms()) {
            let found = vectors(blueprint.terms()).find(|&n| reads_in(&operands.a, n, size));
            blueprint.a_vector = found.unwrap_or(1);
        }
        Self::with(client, operands, blueprint)
    }

    pub(super) fn with(
        client: &Client,
        operands: &'a Operands,
        blueprint: Blueprint,
    ) -> Result<Self, String> {
        let Sizes { m, n, .. } = operands.sizes();
        let (x, y) = (n.div_ceil(blueprint.columns()), m.div_ceil(blueprint.rows));
        let (most_x, most_y, _) = client.properties().hardware.max_cube_count;
        if x > most_x as usize || y > most_y as usize {
            return Err("there are too many rows or columns".into());
        }
        Ok(Self {
            operands,
            blueprint,
            cubes: [x as u32, y as u32],
        })
    }

    /// Writes the product to `out`, `[m, n]`, contiguous.
    pub(crate) fn launch(&self, client: &Client, out: Output) {
        let (bp, Operands { a, b, element }) = (self.blueprint, self.operands);
        let Sizes { m, n, k } = self.operands.sizes();
        let b_pitch = match bp.b {
            Major::Row => b.strides[0],
            Major::Column => b.strides[1],
        };
        let (a_pitch, b_pitch) = (a.strides[0] / bp.a_vector, b_pitch / bp.b_vector);
        let address = address_type(&[a, b], element.size())
            .max(address_type(&[out.tensor], out.element.size()));
        // SAFETY: the operands were checked to hold their shapes and strides, and their vectors to begin at multiples of
        // their sizes; rows and columns past the last are read as the last, and not written.
        unsafe {
            product_few_rows_kernel::launch_unchecked(
                client,
                CubeCount::Static(self.cubes[0], self.cubes[1], 1),
                bp.cube_dim(),
                address,
                bp.a_vector,
                bp.b_vector,
                a.clone().into_buffer_arg(),
                b.clone().into_buffer_arg(),
                out.tensor.clone().into_buffer_arg(),
                ExtentLaunch::new(m, n, k, a_pitch, b_pitch),
                bp,
                elem_type(*element),
                elem_type(out.element),
            );
        }
    }
}

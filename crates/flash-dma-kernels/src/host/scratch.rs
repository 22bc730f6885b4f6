//! Scratch buffers and launches of one unit per item, for selection and key lists.

use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::{CubeCount, TensorBinding};
use cubecl::{CubeDim, calculate_cube_count_elemwise};
use flash_dma_problem::contiguous_strides;

/// A new contiguous u32 buffer with undefined content; one word for empty shapes, so that it can always be bound.
pub(crate) fn scratch<const R: usize>(client: &Client, shape: [usize; R]) -> TensorBinding {
    let strides = contiguous_strides(&shape).collect();
    let handle = client.empty(bytes(shape));
    #[cfg(feature = "internals")]
    crate::host::peak::observe(client, &handle, bytes(shape));
    // SAFETY: the buffer holds the product of the shape, and the strides are those of that shape.
    unsafe { TensorBinding::from_raw_parts(handle, strides, shape.into()) }
}

/// The bytes that [`scratch`] requests for a shape; the workspaces of the passes are sums of these.
pub(crate) fn bytes<const R: usize>(shape: [usize; R]) -> usize {
    shape.iter().product::<usize>().max(1) * size_of::<u32>()
}

/// The smallest address type that indexes every one of `buffers`, all of 32-bit elements.
pub(crate) fn address_type<const N: usize>(buffers: [&TensorBinding; N]) -> AddressType {
    crate::host::check::address_type(&buffers, size_of::<u32>())
}

/// Cubes that give every one of `items` (not 0) a unit; units past the items must return.
pub(crate) fn one_unit_each(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    // `CubeDim::new` narrows the number to 32 bits; a million units fill the largest cube of any device.
    let dim = CubeDim::new(client, items.min(1 << 20));
    (calculate_cube_count_elemwise(client, items, dim), dim)
}

/// A grid of at least `count` cubes (not 0) of `dim` units; cubes past the count must return.
pub(crate) fn cubes(client: &Client, count: usize, dim: CubeDim) -> CubeCount {
    calculate_cube_count_elemwise(client, count * dim.num_elems() as usize, dim)
}

//! Constant outputs, for elements to which no key and no query contributes.

use crate::host::check::address_type;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

const PER_UNIT: usize = 16;

/// Sets every element of the contiguous `dst` to `value`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<F: Float>(
    dst: &mut Tensor<F>,
    len: usize,
    value: f32,
    #[define(F)] _element: ElemType,
) {
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut at = ABSOLUTE_POS;
    while at < len {
        dst[at] = F::cast_from(value);
        at += stride;
    }
}

/// Sets every element of the contiguous tensor `dst` to `value`.
pub(crate) fn fill(client: &Client, dst: &TensorBinding, value: f32, element: ElemType) {
    let len = dst.shape.iter().product::<usize>();
    if len == 0 {
        return;
    }
    let units = len.div_ceil(PER_UNIT);
    let cube_dim = CubeDim::new(client, units);
    let cubes = units.div_ceil(cube_dim.num_elems() as usize).min(65535);
    // SAFETY: the kernel writes `len` elements, which the caller checked the buffer to hold.
    unsafe {
        fill_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            cube_dim,
            address_type(&[dst], element.size()),
            dst.clone().into_tensor_arg(),
            len,
            value,
            element,
        );
    }
}

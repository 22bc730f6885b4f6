//! Buffers for the tests of this crate, which run on cubecl-cpu.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::CopyDescriptor;
use flash_dma_problem::contiguous_strides;

pub(crate) mod placement;

/// The client of cubecl-cpu.
pub(crate) fn client() -> Client {
    cubecl::Device::cpu()
        .expect("this build links cubecl-cpu")
        .client()
}

/// A tensor of `values` (row-major) laid out with `strides`.
pub(crate) fn strided<E: CubeElement>(
    client: &Client,
    values: &[E],
    shape: &[usize],
    strides: &[usize],
) -> TensorBinding {
    let reach: usize = shape
        .iter()
        .zip(strides)
        .map(|(n, s)| n.max(&1).saturating_sub(1) * s)
        .sum();
    let mut laid_out = vec![values[0]; reach + 1];
    for (i, &value) in values.iter().enumerate() {
        let mut rest = i;
        let mut offset = 0;
        for (n, stride) in shape.iter().zip(strides).rev() {
            if *n > 0 {
                offset += rest % n * stride;
                rest /= n;
            }
        }
        laid_out[offset] = value;
    }
    let handle = client.create_from_slice(E::as_bytes(&laid_out));
    // SAFETY: the buffer reaches the last element.
    unsafe {
        TensorBinding::from_raw_parts(
            handle,
            strides.iter().copied().collect(),
            shape.iter().copied().collect(),
        )
    }
}

/// A contiguous tensor of zeros of a 32-bit type.
pub(crate) fn zeros(client: &Client, shape: &[usize]) -> TensorBinding {
    let words = shape.iter().product::<usize>();
    let handle = client.create_from_slice(u32::as_bytes(&vec![0; words.max(1)]));
    // SAFETY: the buffer holds the product of the shape, and the strides are those of that shape.
    unsafe {
        TensorBinding::from_raw_parts(
            handle,
            contiguous_strides(shape).collect(),
            shape.iter().copied().collect(),
        )
    }
}

/// The content of a contiguous u32 tensor.
pub(crate) fn read_u32(client: &Client, tensor: TensorBinding) -> Vec<u32> {
    let words = tensor.size();
    if words == 0 {
        return Vec::new();
    }
    let bytes = client.read_one_unchecked_tensor(CopyDescriptor {
        handle: tensor.handle,
        shape: tensor.shape,
        strides: tensor.strides,
        elem_size: size_of::<u32>(),
    });
    u32::from_bytes(&bytes)[..words].to_vec()
}

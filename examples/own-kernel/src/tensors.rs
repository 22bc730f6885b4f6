//! Between `f64` on the host and contiguous tensors on a device.

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::server::{CopyDescriptor, Handle};
use flash_dma_kernels::{ElementType, contiguous_strides};
use half::{bf16, f16};

/// A contiguous tensor of `values`, rounded to `element`.
#[must_use]
pub fn upload(
    client: &Client,
    values: &[f64],
    shape: &[usize],
    element: ElementType,
) -> TensorBinding {
    let bytes: Vec<u8> = match element {
        ElementType::F32 => bytes(values, |x| (x as f32).to_ne_bytes()),
        ElementType::F16 => bytes(values, |x| f16::from_f64(x).to_ne_bytes()),
        ElementType::Bf16 => bytes(values, |x| bf16::from_f64(x).to_ne_bytes()),
    };
    binding(client.create_from_slice(&bytes), shape)
}

fn bytes<const N: usize>(values: &[f64], convert: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| convert(x)).collect()
}

/// A contiguous tensor of undefined content with elements of `size` bytes.
///
/// `client.empty_tensor` would pad the rows on CUDA; a plain buffer keeps them contiguous.
#[must_use]
pub fn empty(client: &Client, shape: &[usize], size: usize) -> TensorBinding {
    binding(client.empty(shape.iter().product::<usize>() * size), shape)
}

/// The values of a contiguous f32 tensor; waits for what was launched before.
#[must_use]
pub fn download(client: &Client, tensor: TensorBinding) -> Vec<f64> {
    let bytes = client.read_one_unchecked_tensor(CopyDescriptor {
        handle: tensor.handle,
        shape: tensor.shape,
        strides: tensor.strides,
        elem_size: 4,
    });
    let (words, _) = bytes.as_chunks::<4>();
    let values = words.iter().map(|&word| f32::from_ne_bytes(word));
    values.map(f64::from).collect()
}

fn binding(handle: Handle, shape: &[usize]) -> TensorBinding {
    // SAFETY: every handle of this file holds the product of its shape.
    unsafe {
        TensorBinding::from_raw_parts(
            handle,
            contiguous_strides(shape).collect(),
            shape.iter().copied().collect(),
        )
    }
}

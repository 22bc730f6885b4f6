//! Numbers as bytes on a device.

use super::{Host, narrow, of_element};
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_problem::{ElementType, contiguous_strides};

pub(crate) struct Output {
    pub(crate) handle: Handle,
    pub(crate) shape: Vec<usize>,
    pub(crate) element: ElementType,
}

pub(crate) fn bytes_of(values: &[f64], element: ElementType) -> Vec<u8> {
    fn cast<E: Host>(values: &[f64]) -> Vec<u8> {
        bytemuck::cast_slice(&narrow::<E>(values)).to_vec()
    }
    of_element!(element, cast(values))
}

pub(crate) fn values_of(bytes: &[u8], element: ElementType) -> Vec<f64> {
    fn cast<E: Host>(bytes: &[u8]) -> Vec<f64> {
        let values = bytes.chunks_exact(size_of::<E>());
        values
            .map(|x| bytemuck::pod_read_unaligned::<E>(x).to_f64())
            .collect()
    }
    of_element!(element, cast(bytes))
}

/// A tensor of this shape, row after row.
pub fn contiguous(handle: &Handle, shape: &[usize]) -> TensorBinding {
    let strides: Vec<usize> = contiguous_strides(shape).collect();
    binding(handle, shape, &strides)
}

/// A tensor of these strides, which stay within the buffer.
pub fn binding(handle: &Handle, shape: &[usize], strides: &[usize]) -> TensorBinding {
    TensorBinding {
        handle: handle.clone().binding(),
        strides: strides.iter().copied().collect(),
        shape: shape.iter().copied().collect(),
        tiling: Default::default(),
    }
}

impl Output {
    pub(crate) fn binding(&self) -> TensorBinding {
        contiguous(&self.handle, &self.shape)
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

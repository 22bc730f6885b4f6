//! Parts of one tensor on every CubeCL runtime, and the buffers of their gradients.

use super::tensors::empty;
use crate::ops::packed::PackedOps;
use crate::types::PackedRows;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::kernel::{slice, untile};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::zspace::metadata::Metadata;
use flash_dma_problem::Problem;

impl PackedOps for CubeBackend {
    fn packed_split(x: FloatTensor<Self>) -> PackedRows<Self> {
        let x = untile(x);
        let [batch, len, parts, heads, head_dim] = x.meta.shape().dims();
        let part = |index: usize| {
            // A view if its begin and its end have the alignment of the device.
            let ranges = [0..batch, 0..len, index..index + 1, 0..heads, 0..head_dim];
            let part = slice(x.clone(), &ranges);
            let strides = part.meta.strides();
            let strides = [strides[0], strides[3], strides[1], strides[4]];
            let meta = Metadata::new([batch, heads, len, head_dim], strides);
            CubeTensor::new(part.client, part.handle, meta, part.device, part.dtype)
        };
        PackedRows::from_parts((0..parts).map(part).collect())
    }

    fn packed_join(rows: PackedRows<Self>) -> FloatTensor<Self> {
        let parts: Vec<_> = rows.into_parts().into_iter().map(untile).collect();
        match neighbours(&parts) {
            Some(distance) => joined(&parts, distance),
            None => {
                let apart = parts.chunks(1).map(|part| joined(part, 0));
                Self::float_cat(apart.collect(), 2)
            }
        }
    }
}

/// The parts as one tensor `[batch, len, parts, heads, head_dim]`, `distance` elements apart.
fn joined(parts: &[CubeTensor], distance: usize) -> CubeTensor {
    let (first, last) = (&parts[0], &parts[parts.len() - 1]);
    let [batch, heads, len, head_dim] = first.meta.shape().dims();
    let strides = first.meta.strides();
    let strides = [strides[0], strides[2], distance, strides[1], strides[3]];
    let shape = [batch, len, parts.len(), heads, head_dim];
    let mut handle = first.handle.clone();
    handle.offset_end = last.handle.offset_end;
    CubeTensor::new(
        first.client.clone(),
        handle,
        Metadata::new(shape, strides),
        first.device.clone(),
        first.dtype,
    )
}

/// Distance of successive parts in elements, if they lie in one buffer in one layout.
fn neighbours(parts: &[CubeTensor]) -> Option<usize> {
    let begin = |part: &CubeTensor| part.handle.offset_start.unwrap_or(0);
    let [first, second, ..] = parts else {
        return None;
    };
    let bytes = begin(second).checked_sub(begin(first))?;
    let size = first.dtype.size() as u64;
    let follows = |pair: &[CubeTensor]| {
        share_buffer(&pair[0], &pair[1])
            && begin(&pair[1]).checked_sub(begin(&pair[0])) == Some(bytes)
            && pair[0].dtype == pair[1].dtype
            && pair[0].meta.shape() == pair[1].meta.shape()
            && pair[0].meta.strides() == pair[1].meta.strides()
    };
    let neighbours = bytes > 0 && bytes.is_multiple_of(size) && parts.windows(2).all(follows);
    neighbours.then_some((bytes / size) as usize)
}

fn share_buffer(a: &CubeTensor, b: &CubeTensor) -> bool {
    a.handle.memory.descriptor() == b.handle.memory.descriptor()
}

/// Empty gradients of `rows`, q, k and v: without gaps, and one after another in one buffer for parts of one tensor,
/// as [`PackedOps::packed_join`] wants them.
pub(super) fn empty_gradients(rows: [&CubeTensor; 3], problem: &Problem) -> [CubeTensor; 3] {
    let [q, k, v] = rows;
    let (q_shape, kv_shape) = (problem.q_shape(), problem.kv_shape());
    if !share_buffer(k, v) || kv_shape.contains(&0) {
        return [q_shape, kv_shape, kv_shape].map(|shape| empty(q, shape, q.dtype));
    }
    if share_buffer(q, k) && q_shape == kv_shape {
        return neighbouring(q, kv_shape);
    }
    let [k, v] = neighbouring(q, kv_shape);
    [empty(q, q_shape, q.dtype), k, v]
}

/// Tensors of one shape, one after another at the device's alignment.
fn neighbouring<const N: usize>(like: &CubeTensor, shape: [usize; 4]) -> [CubeTensor; N] {
    let size = like.dtype.size();
    let alignment = like.client.properties().memory.alignment as usize;
    let len: usize = shape.iter().product();
    let distance = (len * size).next_multiple_of(alignment.max(size));
    let all = empty(like, [N, distance / size], like.dtype);
    let [_, heads, rows, width] = shape;
    let strides = [heads * rows * width, rows * width, width, 1];
    std::array::from_fn(|n| {
        let (begin, end) = (n * distance, (N - 1 - n) * distance);
        let handle = all.handle.clone();
        let handle = handle.offset_start(begin as u64).offset_end(end as u64);
        CubeTensor::new(
            all.client.clone(),
            handle,
            Metadata::new(shape, strides),
            all.device.clone(),
            all.dtype,
        )
    })
}

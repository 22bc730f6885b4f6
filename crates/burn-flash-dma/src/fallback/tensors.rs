//! Plain Burn operations shared by the default bodies.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::kind::Basic;
use burn::tensor::{BoolDType, DType, Device, FloatDType, Int, Tensor, TensorData};

pub(crate) fn to_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(tensor, FloatDType::F32)
}

/// Casts, unless the tensor has that type.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if tensor.dtype() == DType::from(dtype) {
        return tensor;
    }
    B::float_cast(tensor, dtype)
}

/// Casts 16-bit types up to f32; f64 stays.
pub(crate) fn at_least_f32<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// The tensor off the graph. (A detached leaf is a leaf, which autodiff would track again.)
pub(crate) fn constant<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.detach().set_require_grad(false)
}

/// Reshapes. Burn's `reshape` reads a 0 as "keep the axis".
pub(crate) fn reshaped<const D: usize, const E: usize, K: Basic>(
    tensor: Tensor<D, K>,
    shape: [usize; E],
) -> Tensor<E, K> {
    unless_empty(tensor, shape, |tensor| tensor.reshape(shape))
}

/// A view of the tensor in this shape. Burn cannot reshape empty tensors, nor expand to an axis of size 0.
pub(crate) fn unless_empty<const D: usize, const E: usize, K: Basic>(
    tensor: Tensor<D, K>,
    shape: [usize; E],
    view: impl FnOnce(Tensor<D, K>) -> Tensor<E, K>,
) -> Tensor<E, K> {
    match shape.contains(&0) {
        true => Tensor::empty(shape, (&tensor.device(), tensor.dtype())),
        false => view(tensor),
    }
}

pub(crate) fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_or_init_device_settings::<B>(device).bool_dtype
}

/// Greatest divisor of `count` up to `most`; 1 if there is none.
pub(crate) fn greatest_divisor(count: usize, most: usize) -> usize {
    (1..=most)
        .rev()
        .find(|&n| count.is_multiple_of(n))
        .unwrap_or(1)
}

pub(crate) fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

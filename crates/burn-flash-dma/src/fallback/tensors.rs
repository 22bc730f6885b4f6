//! Plain Burn operations that the default bodies share.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, get_or_init_device_settings};
use burn::tensor::kind::Basic;
use burn::tensor::{BoolDType, FloatDType, IntDType, Shape, Tensor};

/// The position of each row and the index of each column, as tensors of a shape of four axes.
pub(crate) fn positions_and_keys<B: Backend>(
    [q_len, k_len]: [usize; 2],
    causal: bool,
    device: &B::Device,
    shape: Shape,
) -> (IntTensor<B>, IntTensor<B>) {
    let positions = B::int_arange(0..q_len as i64, device, IntDType::I32);
    let positions = if causal {
        let shift = k_len as i64 - q_len as i64;
        B::int_add_scalar(positions, shift.into())
    } else {
        B::int_full(
            Shape::new([q_len]),
            (k_len as i64 - 1).into(),
            device,
            IntDType::I32,
        )
    };
    let keys = B::int_arange(0..k_len as i64, device, IntDType::I32);
    axis_pair::<B>(positions, keys, shape)
}

/// Two index vectors as the rows and the columns of a `[batch, heads, rows, columns]` tensor.
pub(crate) fn axis_pair<B: Backend>(
    rows: IntTensor<B>,
    columns: IntTensor<B>,
    shape: Shape,
) -> (IntTensor<B>, IntTensor<B>) {
    let [_, _, height, width] = shape.dims();
    let rows = B::int_reshape(rows, Shape::new([1, 1, height, 1]));
    let columns = B::int_reshape(columns, Shape::new([1, 1, 1, width]));
    (
        B::int_expand(rows, shape.clone()),
        B::int_expand(columns, shape),
    )
}

pub(crate) fn to_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(tensor, FloatDType::F32)
}

pub(crate) fn zeros<B: Backend>(
    shape: impl Into<Shape>,
    device: &B::Device,
    dtype: FloatDType,
) -> FloatTensor<B> {
    B::float_zeros(shape.into(), device, dtype)
}

/// The tensor in another shape. Burn's `reshape` reads a 0 as "keep the axis".
pub(crate) fn reshaped<const D: usize, const E: usize, K: Basic>(
    tensor: Tensor<D, K>,
    shape: [usize; E],
) -> Tensor<E, K> {
    if shape.contains(&0) {
        Tensor::empty(shape, (&tensor.device(), tensor.dtype()))
    } else {
        tensor.reshape(shape)
    }
}

pub(crate) fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_or_init_device_settings::<B>(device).bool_dtype
}

/// The greatest divisor of `count` up to `most`; 1 if there is none.
pub(crate) fn greatest_divisor(count: usize, most: usize) -> usize {
    (1..=most)
        .rev()
        .find(|&n| count.is_multiple_of(n))
        .unwrap_or(1)
}

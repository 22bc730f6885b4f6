//! q, k and v in one tensor: [`PackedOps`](crate::ops::PackedOps).

use crate::types::PackedRows;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

/// See [`PackedOps::packed_split`](crate::ops::PackedOps::packed_split).
pub fn split<B: Backend>(x: FloatTensor<B>) -> PackedRows<B> {
    let [batch, len, parts, heads, head_dim] = x.shape().dims();
    let part = |index: usize| {
        let mut slices = vec![Slice::full(); 5];
        slices[2] = Slice::from(index..index + 1);
        let part = B::float_slice(x.clone(), &slices);
        let part = B::float_reshape(part, Shape::new([batch, len, heads, head_dim]));
        B::float_swap_dims(part, 1, 2)
    };
    PackedRows::from_parts((0..parts).map(part).collect())
}

/// See [`PackedOps::packed_join`](crate::ops::PackedOps::packed_join).
pub fn join<B: Backend>(rows: PackedRows<B>) -> FloatTensor<B> {
    let part = |part: FloatTensor<B>| {
        let [batch, heads, len, head_dim] = part.shape().dims();
        let part = B::float_swap_dims(part, 1, 2);
        B::float_reshape(part, Shape::new([batch, len, 1, heads, head_dim]))
    };
    B::float_cat(rows.into_parts().into_iter().map(part).collect(), 2)
}

//! The bits of a tile plan as flags.

use crate::fallback::tensors::bool_dtype;
use burn::backend::tensor::{BoolTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{IntDType, Shape, Slice};
use flash_dma_problem::PlanGeometry;

/// Bits of a word.
const WORD: usize = 32;
const KEYS: usize = PlanGeometry::KEY_BLOCK;

/// The mask in its own shape, from its bits.
pub(super) fn unpack<B: Backend>(bits: IntTensor<B>, plan: &PlanGeometry) -> BoolTensor<B> {
    let device = bits.device();
    let [batch, heads, blocks, queries, _] = plan.bits_shape();
    let shape = Shape::new([batch * heads, blocks, queries, 2, WORD]);
    let words = B::int_reshape(bits, Shape::new([batch * heads, blocks, queries, 2, 1]));
    let powers = B::int_reshape(powers::<B>(&device), Shape::new([1, 1, 1, 1, WORD]));
    let masked = B::bitwise_and(
        B::int_expand(words, shape.clone()),
        B::int_expand(powers, shape),
    );
    let shown = B::bool_not(B::int_equal_elem(
        masked,
        0.into(),
        bool_dtype::<B>(&device),
    ));
    let shown = B::bool_swap_dims(shown, 1, 2);
    let shown = B::bool_reshape(shown, Shape::new([batch, heads, queries, blocks * KEYS]));
    let mut slices = vec![Slice::full(); 3];
    slices.push((0..plan.mask[3]).into());
    B::bool_slice(shown, &slices)
}

/// `2^0 .. 2^31` as 32-bit words.
fn powers<B: Backend>(device: &B::Device) -> IntTensor<B> {
    let exponents = B::int_arange(0..WORD as i64, device, IntDType::I32);
    let ones = B::int_ones(Shape::new([WORD]), device, IntDType::I32);
    B::bitwise_left_shift(ones, exponents)
}

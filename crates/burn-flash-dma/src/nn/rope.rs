//! Rotary encoding at any position.

use burn::nn::RotaryEncoding;
use burn::tensor::{DType, FloatDType, Int, Tensor};

/// Rotates `[batch, heads, len, head_dim]` as the positions `start..start + len`.
///
/// Positions within the table of `rope` are read from it; past its end the same angles are computed for the call.
pub(super) fn rotate(rope: &RotaryEncoding, tensor: Tensor<4>, start: usize) -> Tensor<4> {
    let [_, _, len, _] = tensor.dims();
    let [table, _, _] = rope.freq_complex.dims();
    // The rotation's table is f32, and in 16 bits distant positions would share an angle.
    let dtype = tensor.dtype();
    let tensor = tensor.cast(DType::F32);
    let rotated = if start + len <= table {
        rope.apply(tensor, start)
    } else {
        let mut rope = rope.clone();
        rope.freq_complex = frequencies(&rope, start, len);
        rope.apply(tensor, 0)
    };
    rotated.cast(dtype)
}

/// `[len, head_dim, 2]`: cosine and sine of each position's angle, twice per pair of features, as in the
/// table.
fn frequencies(rope: &RotaryEncoding, start: usize, len: usize) -> Tensor<3> {
    let device = rope.theta.device();
    let [pairs] = rope.theta.dims();
    // In f32 whatever the device's default is: 16 bits hold no position past a few hundred.
    let options = (&device, DType::I32);
    let positions = Tensor::<1, Int>::arange(start as i64..(start + len) as i64, options);
    let positions = positions.cast(FloatDType::F32).reshape([len, 1, 1]);
    let angles: Tensor<3> = positions * rope.theta.clone().reshape([1, pairs, 1]);
    let angles = angles.repeat_dim(2, 2).reshape([len, 2 * pairs, 1]);
    Tensor::cat(vec![angles.clone().cos(), angles.sin()], 2)
}

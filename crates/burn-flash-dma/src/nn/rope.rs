//! Rotary encoding at any position.

use burn::nn::RotaryEncoding;
use burn::tensor::{DType, FloatDType, Int, Tensor};

/// A table of the angles of the positions `start..start + len`, `[positions, head_dim, 2]`, and the first one's place in
/// it.
///
/// Positions within the table of `rope` are read from it; past its end the same angles are computed for the call.
pub(super) fn angles(rope: &RotaryEncoding, start: usize, len: usize) -> (Tensor<3>, usize) {
    let [table, _, _] = rope.freq_complex.dims();
    if start + len <= table {
        (rope.freq_complex.clone(), start)
    } else {
        (frequencies(rope, start, len), 0)
    }
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

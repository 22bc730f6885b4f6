//! The tensors of a norm besides its rows.

use cubecl::prelude::TensorBinding;

/// The weights and the rotary table of rows.
#[derive(Clone, Debug)]
pub struct NormParameters {
    /// `[width]`, contiguous, the problem's type of gamma; given exactly if the problem has a norm.
    pub gamma: Option<TensorBinding>,
    /// `[positions, width / 2, 2]`, f32, any strides with a contiguous last axis: cosine and sine of each pair of
    /// features; given exactly if the problem has rotary encoding.
    pub table: Option<TensorBinding>,
}

/// The outputs of [`norm_backward`](super::norm_backward).
#[derive(Clone, Debug)]
pub struct NormGradients {
    /// `[batch, len, heads, width]`, any strides with a contiguous last axis.
    pub x: TensorBinding,
    /// `[width]`, contiguous, the problem's type of gamma; given exactly if the problem has a norm.
    pub gamma: Option<TensorBinding>,
}

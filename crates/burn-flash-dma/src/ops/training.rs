//! Operations of a training step other than attention.

use crate::fallback::tensors::to_f32;
use crate::fallback::training as fallback;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Shape};

/// Operations with gradients of their own, or whose results autodiff does not keep.
///
/// The default bodies are plain Burn operations, fused where Burn fuses, and no backend needs others.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait TrainingOps: Backend {
    /// The rows `tokens` `[tokens]` of `weight` `[vocabulary, width]` in `dtype`. Under autodiff the gradient of a row
    /// is summed in f32 and rounded to the type of `weight` once.
    #[fusion(default)]
    fn training_lookup(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        fallback::lookup::<Self>(weight, tokens, dtype)
    }

    /// Cross-entropy of each row, `[rows]` in f32, of `logits` `[rows, classes]` and the classes `targets` `[rows]`.
    #[fusion(default)]
    fn training_losses(logits: FloatTensor<Self>, targets: IntTensor<Self>) -> FloatTensor<Self> {
        let (losses, _) = fallback::losses::<Self>(logits, targets);
        losses
    }

    /// A zero, `[1]` in f32, whose backward pass gives `output` the gradient `gradient`, and `gradient` none.
    #[fusion(default)]
    fn training_resume(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        drop(gradient);
        Self::float_zeros(Shape::new([1]), &output.device(), FloatDType::F32)
    }

    /// `silu(gate) * up`, element by element, of two tensors of one shape and one type. Arithmetic is f32, rounded
    /// once. Autodiff keeps both; it does not keep the result, but recomputes it when the backward pass reads it.
    #[fusion(default)]
    fn training_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::swiglu::<Self>(gate, up)
    }

    /// Slices of `x` along axis `dim`, of the sizes `sizes`, which add up to it. Under autodiff the gradients of the
    /// parts are concatenated once.
    #[fusion(default)]
    fn training_split(
        x: FloatTensor<Self>,
        dim: usize,
        sizes: Vec<usize>,
    ) -> Vec<FloatTensor<Self>> {
        fallback::split::<Self>(x, dim, &sizes)
    }

    /// `x` in f32. Autodiff does not keep the result, but casts again when the backward pass reads it, also if `x`
    /// does not learn by it: its gradient is zero then. Without `x` in the graph the result would be kept.
    #[fusion(default)]
    fn training_widen(x: FloatTensor<Self>, learns: bool) -> FloatTensor<Self> {
        let _ = learns;
        to_f32::<Self>(x)
    }
}

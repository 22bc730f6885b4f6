//! What a training step needs beside attention.

use crate::fallback::tensors::to_f32;
use crate::fallback::training as fallback;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Shape};

/// Operations of a training step whose gradients are their own, or which autodiff does not keep the results of.
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

    /// The cross-entropy of each row, `[rows]` in f32, of `logits` `[rows, classes]` and the classes `targets`
    /// `[rows]`.
    #[fusion(default)]
    fn training_losses(logits: FloatTensor<Self>, targets: IntTensor<Self>) -> FloatTensor<Self> {
        let (losses, _) = fallback::losses::<Self>(logits, targets);
        losses
    }

    /// A zero, `[1]` in f32, whose backward pass gives `output` the gradient `gradient`, and nothing to `gradient`.
    #[fusion(default)]
    fn training_resume(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        drop(gradient);
        Self::float_zeros(Shape::new([1]), &output.device(), FloatDType::F32)
    }

    /// `silu(gate) * up`, element by element, of two tensors of one shape and one type. Arithmetic is f32, rounded once.
    /// Under autodiff both are kept; the result is not, but computed again where the backward pass reads it.
    #[fusion(default)]
    fn training_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::swiglu::<Self>(gate, up)
    }

    /// `x`, cut along axis `dim` into parts of the sizes `sizes`, which add up to it: slices. Under autodiff the gradients
    /// of the parts are laid side by side once.
    #[fusion(default)]
    fn training_split(
        x: FloatTensor<Self>,
        dim: usize,
        sizes: Vec<usize>,
    ) -> Vec<FloatTensor<Self>> {
        fallback::split::<Self>(x, dim, &sizes)
    }

    /// `x` in f32. Under autodiff the result is not kept, but cast again where the backward pass reads it, also if `x` does
    /// not learn by it: its gradient is zero then. Without `x` in the graph the result would be kept.
    #[fusion(default)]
    fn training_widen(x: FloatTensor<Self>, learns: bool) -> FloatTensor<Self> {
        let _ = learns;
        to_f32::<Self>(x)
    }
}

//! Operations of a training step other than attention.

use super::ProductOps;
use crate::fallback::tensors::{cast, to_f32};
use crate::fallback::{training as fallback, update};
use crate::types::{FloatList, OptionalFloat, PackedRows};
#[cfg(feature = "fusion")]
use crate::types::{OptionalFloatMetadata, PackedRowsMetadata};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Shape, Slice};
use flash_dma_problem::{AdamWStep, ElementType};

/// Operations with gradients of their own, or whose results autodiff does not keep.
///
/// The default bodies are plain Burn operations, fused where Burn fuses. CubeCL's runtimes have kernels for cross-entropy, SwiGLU,
/// linear scores, joined heads and the optimiser's update, and take their own product for the gradient of an embedding; no
/// backend needs others.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait TrainingOps: ProductOps {
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

    /// Gradient of the table of [`training_lookup`](Self::training_lookup), `[vocabulary, width]` in f32, from that of its
    /// rows, `[tokens, width]`.
    #[fusion(
        dtype = burn::tensor::DType::F32,
        shape = Shape::new([*vocabulary, gradient[1]])
    )]
    fn training_lookup_gradient(
        gradient: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        vocabulary: usize,
    ) -> FloatTensor<Self> {
        fallback::lookup_gradient::<Self>(gradient, tokens, vocabulary)
    }

    /// Cross-entropy of each row, `[rows]` in f32, of `logits` `[rows, classes]` and the classes `targets` `[rows]`.
    #[fusion(default)]
    fn training_losses(logits: FloatTensor<Self>, targets: IntTensor<Self>) -> FloatTensor<Self> {
        let (losses, _) = Self::training_losses_normalised(logits, targets);
        losses
    }

    /// [`training_losses`](Self::training_losses), and what the gradient needs: parts of the softmax
    /// `exp((logit - greatest) - log_sum)` of each row, `[rows, 2]` in f32. Their sum, a single number, would be rounded to the
    /// last bit of the greatest logit, and the probabilities with it.
    #[fusion(meta = |logits, _targets| {
        let rows = logits.shape[0];
        let tensor = |shape| TensorSpec { shape, dtype: burn::tensor::DType::F32 };
        (tensor(Shape::new([rows])), tensor(Shape::new([rows, 2])))
    })]
    fn training_losses_normalised(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        fallback::losses::<Self>(logits, targets)
    }

    /// Gradient of the logits, in their type, from that of the losses, `[rows]` in f32.
    #[fusion(dtype = logits, shape = logits)]
    fn training_losses_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        normaliser: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::losses_gradient::<Self>(logits, targets, normaliser, gradient)
    }

    /// Sum of the cross-entropies of tokens, each times its weight, `[1]` in f32: of features `x` `[tokens, width]`, `weight`
    /// `[width, classes]`, the classes `targets` and the weights `weights`, `[tokens]` in f32. The logits `x · weight` are those
    /// of `rows` tokens at a time, a multiple of 32. Autodiff computes the gradients of `x` and `weight` on the way and keeps
    /// them in place of logits; the weights are constants. With `by_rows` the gradient of `weight` lies in memory as that of its
    /// transpose.
    #[fusion(default)]
    fn training_linear_losses(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        rows: usize,
        by_rows: bool,
    ) -> FloatTensor<Self> {
        let operands = LinearLosses::<Self> {
            x,
            weight,
            by_rows,
            targets,
            weights,
        };
        operands.sum(rows, [false; 2]).0
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
    #[fusion(dtype = gate, shape = gate)]
    fn training_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::swiglu::<Self>(gate, up)
    }

    /// Gradients of the gate and of `up`, from that of [`training_swiglu`](Self::training_swiglu), and with `again` its
    /// result once more.
    #[fusion(meta = |gate, up, _gradient, again| {
        let result = match again {
            true => OptionalFloatMetadata::Some(gate.clone()),
            false => OptionalFloatMetadata::None,
        };
        (gate.clone(), up.clone(), result)
    })]
    fn training_swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        again: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, OptionalFloat<Self>) {
        fallback::swiglu_backward::<Self>(gate, up, gradient, again)
    }

    /// [`training_swiglu`](Self::training_swiglu) `·` `weight`, as [`linear_product`](ProductOps::linear_product). Autodiff
    /// keeps neither factor: the backward pass computes the first one in the pass that computes its gradients.
    #[fusion(default)]
    fn training_swiglu_product(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_product(Self::training_swiglu(gate, up), weight)
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

    /// Heads `[batch, len, heads, head_dim]` of a token side by side, which [`training_split`](Self::training_split) splits.
    #[fusion(meta = |rows| joint_heads(rows))]
    fn training_join_heads(#[extension_type] rows: PackedRows<Self>) -> FloatTensor<Self> {
        Self::float_cat(rows.into_parts(), 2)
    }

    /// `x` in f32. Autodiff does not keep the result, but casts again when the backward pass reads it.
    #[fusion(default)]
    fn training_widen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        to_f32::<Self>(x)
    }

    /// `tokens` `[batch, len, width]` times `directions` `[heads, width]`, f32: `[batch, heads, len]` in f32. Under autodiff
    /// the directions learn, and the tokens get zeros unless they learn, too.
    #[fusion(dtype = directions, shape = scores_shape(tokens, directions))]
    fn training_scores(
        tokens: FloatTensor<Self>,
        directions: FloatTensor<Self>,
        tokens_learn: bool,
    ) -> FloatTensor<Self> {
        let _ = tokens_learn;
        fallback::scores::<Self>(tokens, directions)
    }

    /// Gradient of the directions, `[heads, width]` in f32, from that of [`training_scores`](Self::training_scores).
    #[fusion(dtype = gradient, shape = directions_shape(tokens, gradient))]
    fn training_scores_gradient(
        tokens: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::scores_gradient::<Self>(tokens, gradient)
    }

    /// `sums`, `[SQUARE_SUMS]` in f32, after parts of the sum of the squares of all `xs` were added to them: their sum grows
    /// by that of all squares.
    #[fusion(meta = |sums, _xs| sums.clone())]
    fn training_add_squares(
        sums: FloatTensor<Self>,
        #[extension_type] xs: FloatList<Self>,
    ) -> FloatTensor<Self> {
        update::add_squares::<Self>(sums, xs)
    }

    /// `x * factor`, rounded once to the type of `x`; `factor` is `[1]` in f32.
    #[fusion(dtype = x, shape = x)]
    fn training_scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        update::scale::<Self>(x, factor)
    }

    /// The parameters and their moments after a step of AdamW, where gradients count `factor` times, `[1]` in f32. There is
    /// one gradient and one of each moment for each parameter, of its shape and type. Arithmetic is f32, rounded once.
    #[fusion(meta = |parameters, _gradients, moments_1, moments_2, _factor, _step| {
        (parameters.clone(), moments_1.clone(), moments_2.clone())
    })]
    fn training_adamw(
        #[extension_type] parameters: FloatList<Self>,
        #[extension_type] gradients: FloatList<Self>,
        #[extension_type] moments_1: FloatList<Self>,
        #[extension_type] moments_2: FloatList<Self>,
        factor: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatList<Self>, FloatList<Self>, FloatList<Self>) {
        let lists = [parameters, gradients, moments_1, moments_2];
        update::adamw::<Self>(lists, factor, step).into()
    }
}

#[cfg(feature = "fusion")]
fn joint_heads(rows: &PackedRowsMetadata) -> TensorSpec {
    let [batch, len, k_heads, head_dim] = rows.k.shape.dims();
    let q_heads = match &rows.q {
        OptionalFloatMetadata::None => 0,
        OptionalFloatMetadata::Some(q) => q.shape[2],
    };
    let heads = q_heads + k_heads + rows.v.shape[2];
    TensorSpec::new([batch, len, heads, head_dim].into(), rows.k.dtype)
}

#[cfg(feature = "fusion")]
fn scores_shape(tokens: &Shape, directions: &Shape) -> Shape {
    Shape::new([tokens[0], directions[0], tokens[1]])
}

#[cfg(feature = "fusion")]
fn directions_shape(tokens: &Shape, gradient: &Shape) -> Shape {
    Shape::new([gradient[1], tokens[2]])
}

/// Operands of [`TrainingOps::training_linear_losses`].
pub(crate) struct LinearLosses<B: Backend> {
    /// Features of the tokens, `[tokens, width]`.
    pub x: FloatTensor<B>,
    /// `[width, classes]`.
    pub weight: FloatTensor<B>,
    /// Its gradient is `[classes, width]`.
    pub by_rows: bool,
    /// Classes of the tokens, `[tokens]`.
    pub targets: IntTensor<B>,
    /// Weights of the tokens' losses, `[tokens]` in f32.
    pub weights: FloatTensor<B>,
}

impl<B: TrainingOps> LinearLosses<B> {
    /// The sum, and its gradients of `x` and of the weight (in f32), those that `wanted` says. There is a token.
    pub fn sum(
        self,
        rows: usize,
        wanted: [bool; 2],
    ) -> (FloatTensor<B>, [Option<FloatTensor<B>>; 2]) {
        let [tokens, _] = self.x.shape().dims();
        // Rounded once, not for the products of each part.
        let weight = cast::<B>(self.weight, self.x.dtype().into());
        let add = |sum: &mut Option<FloatTensor<B>>, more| {
            *sum = Some(match sum.take() {
                Some(sum) => B::float_add(sum, more),
                None => more,
            });
        };
        let (mut total, mut of_x, mut of_weight) = (None, Vec::new(), None);
        for start in (0..tokens).step_by(rows) {
            let range = [Slice::from(start..tokens.min(start + rows))];
            let x = B::float_slice(self.x.clone(), &range);
            let targets = B::int_slice(self.targets.clone(), &range);
            let weights = B::float_slice(self.weights.clone(), &range);
            let logits = B::linear_product(x.clone(), weight.clone());
            let (losses, normaliser) =
                B::training_losses_normalised(logits.clone(), targets.clone());
            add(
                &mut total,
                B::float_sum(B::float_mul(losses, weights.clone())),
            );
            if wanted == [false; 2] {
                continue;
            }
            let of_logits = B::training_losses_gradient(logits, targets, normaliser, weights);
            if wanted[0] {
                let of_logits = of_logits.clone();
                of_x.push(B::linear_product_input_gradient(of_logits, weight.clone()));
            }
            if wanted[1] {
                let element = ElementType::F32;
                let (left, right) = match self.by_rows {
                    true => (of_logits, x),
                    false => (x, of_logits),
                };
                let product = B::linear_product_weight_gradient(left, right, element);
                add(&mut of_weight, product);
            }
        }
        let of_x = wanted[0].then(|| B::float_cat(of_x, 0));
        (total.expect("there is a token"), [of_x, of_weight])
    }
}

//! The gradient of an embedding, cross-entropy, SwiGLU, linear scores and an optimiser's update on every CubeCL runtime.

use super::product::multiply;
use super::tensors::{addressable, empty, run, run_checked, run_over};
use crate::fallback::{training, update as fallback};
use crate::ops::training::TrainingOps;
use crate::types::{FloatList, OptionalFloat, PackedRows};
use crate::validate::element_of;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, IntDType, Shape, Slice};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::TensorBinding;
use cubecl::zspace::metadata::Metadata;
use flash_dma_kernels::{LossRows, losses, losses_gradient};
use flash_dma_kernels::{MAX_SCORE_HEADS, linear_scores, linear_scores_gradient};
use flash_dma_kernels::{NormParameters, norm_forward};
use flash_dma_kernels::{
    ParameterUpdate, SwigluGradients, adamw, add_squares, scale, swiglu, swiglu_backward,
};
use flash_dma_problem::{AdamWStep, AttentionError, ElementType, NormProblem};

const LOSSES: &str = "cross-entropy";
const LOSSES_BACKWARD: &str = "cross-entropy's backward pass";
const SWIGLU: &str = "SwiGLU";
const SWIGLU_BACKWARD: &str = "SwiGLU's backward pass";
const SCORES: &str = "linear scores";
const SCORES_BACKWARD: &str = "the linear scores' backward pass";
const JOIN: &str = "the gradient of heads side by side";
const ADAMW: &str = "AdamW's step";

impl TrainingOps for CubeBackend {
    /// One-hot rows and gradients of 16 bits are multiplied as they are, on tensor cores where there are any.
    fn training_lookup_gradient(
        gradient: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        vocabulary: usize,
    ) -> FloatTensor<Self> {
        let [count, _] = gradient.meta.shape().dims();
        let narrow = matches!(gradient.dtype, DType::F16 | DType::BF16);
        if !narrow || count * vocabulary == 0 || vocabulary > training::ONE_HOT_VOCABULARY {
            return training::lookup_gradient::<Self>(gradient, tokens, vocabulary);
        }
        // Rows of such a length begin where the tensor memory accelerator can read them.
        let most = (training::ONE_HOT_NUMBERS / vocabulary).next_multiple_of(64);
        let product = |first: usize| {
            let length = most.min(count - first);
            let range = [Slice::from(first..first + length)];
            let tokens = Self::int_slice(tokens.clone(), &range);
            let tokens = Self::int_reshape(tokens, Shape::new([1, 1, length]));
            let one_hot = training::one_hot::<Self>(tokens, vocabulary, gradient.dtype.into());
            let one_hot = Self::float_reshape(one_hot, Shape::new([vocabulary, length]));
            let rows = Self::float_slice(gradient.clone(), &range);
            multiply(one_hot, rows, DType::F32)
        };
        let products = (0..count).step_by(most).map(product);
        (products.reduce(Self::float_add)).expect("there are tokens")
    }

    fn training_join_heads(rows: PackedRows<Self>) -> FloatTensor<Self> {
        let parts = rows.into_parts();
        match join_heads(&parts) {
            Some(out) => out,
            None => Self::float_cat(parts, 2),
        }
    }

    fn training_losses_normalised(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Some(element) = element_of_all([&logits]) else {
            return training::losses::<Self>(logits, targets);
        };
        let [rows, _] = logits.meta.shape().dims();
        let (logits, targets) = (into_contiguous(logits), words(targets));
        let out = empty(&logits, [rows], DType::F32);
        let normaliser = empty(&logits, [rows, 2], DType::F32);
        let tensors = loss_rows(element, [&logits, &targets, &normaliser]);
        match losses(&logits.client, &tensors, &binding(&out)) {
            Err(AttentionError::Unsupported { .. }) => training::losses::<Self>(logits, targets),
            result => {
                run_over(rows, LOSSES, &out, result);
                (out, normaliser)
            }
        }
    }

    fn training_losses_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        normaliser: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let Some(element) = element_of_all([&logits]) else {
            return training::losses_gradient::<Self>(logits, targets, normaliser, gradient);
        };
        let targets = words(targets);
        let [logits, normaliser, gradient] = [logits, normaliser, gradient].map(into_contiguous);
        // Logits that nothing else reads are written over: with a large vocabulary, the largest tensor of a step.
        let new = (!logits.can_mut()).then(|| like(&logits));
        let tensors = loss_rows(element, [&logits, &targets, &normaliser]);
        let (d, to) = (binding(&gradient), new.as_ref().map(binding));
        match losses_gradient(&logits.client, &tensors, &d, to.as_ref()) {
            Err(AttentionError::Unsupported { .. }) => {
                training::losses_gradient::<Self>(logits, targets, normaliser, gradient)
            }
            result => {
                let out = new.unwrap_or(logits);
                run_checked(LOSSES_BACKWARD, [&out], result);
                out
            }
        }
    }

    fn training_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let Some(element) = element_of_all([&gate, &up]) else {
            return training::swiglu::<Self>(gate, up);
        };
        let [gate, up] = [gate, up].map(into_contiguous);
        let out = like(&gate);
        let [x, y, out_arg] = [&gate, &up, &out].map(binding);
        match swiglu(&gate.client, element, &x, &y, &out_arg) {
            Err(AttentionError::Unsupported { .. }) => training::swiglu::<Self>(gate, up),
            result => {
                let shape = out.meta.shape();
                let features = shape.last().map_or(1, |&features| features.max(1));
                run_over(shape.num_elements() / features, SWIGLU, &out, result);
                out
            }
        }
    }

    fn training_swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        again: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, OptionalFloat<Self>) {
        let Some(element) = element_of_all([&gate, &up, &gradient]) else {
            return training::swiglu_backward::<Self>(gate, up, gradient, again);
        };
        let [gate, up, gradient] = [gate, up, gradient].map(into_contiguous);
        let [x, y, d] = [&gate, &up, &gradient].map(binding);
        // Tensors that nothing else reads are written over: the largest ones of a step, at its peak.
        let in_place = [&gate, &up, &gradient]
            .into_iter()
            .all(|tensor| tensor.can_mut());
        let [of_gate, of_up, out] = [&gate, &up, &gradient].map(|old| match in_place {
            true => old.clone(),
            false => like(old),
        });
        let new = [&of_gate, &of_up, &out].map(binding);
        let grads = match in_place {
            true => SwigluGradients::InPlace { again },
            false => SwigluGradients::New {
                gate: &new[0],
                up: &new[1],
                out: again.then_some(&new[2]),
            },
        };
        let result = swiglu_backward(&gate.client, element, &x, &y, &d, grads);
        if let Err(AttentionError::Unsupported { .. }) = result {
            return training::swiglu_backward::<Self>(gate, up, gradient, again);
        }
        run_checked(SWIGLU_BACKWARD, [&of_gate, &of_up], result);
        let out = OptionalFloat::from_option(again.then_some(out));
        (of_gate, of_up, out)
    }

    fn training_scores(
        tokens: FloatTensor<Self>,
        directions: FloatTensor<Self>,
        _tokens_learn: bool,
    ) -> FloatTensor<Self> {
        let heads = directions.meta.shape()[0];
        if heads > MAX_SCORE_HEADS {
            let some = |heads| {
                let directions = Self::float_slice(directions.clone(), &[heads]);
                Self::training_scores(tokens.clone(), directions, false)
            };
            return Self::float_cat(in_groups(heads).map(some).collect(), 1);
        }
        let Some(element) = element_of_all([&tokens]) else {
            return training::scores::<Self>(tokens, directions);
        };
        let [tokens, directions] = [tokens, directions].map(into_contiguous);
        let shape = [tokens.meta.shape()[0], heads, tokens.meta.shape()[1]];
        let out = empty(&tokens, shape, directions.dtype);
        let [x, d, out_arg] = [&tokens, &directions, &out].map(binding);
        match linear_scores(&tokens.client, element, &x, &d, &out_arg) {
            Err(AttentionError::Unsupported { .. }) => training::scores::<Self>(tokens, directions),
            result => {
                run_over(shape[0] * shape[2], SCORES, &out, result);
                out
            }
        }
    }

    fn training_scores_gradient(
        tokens: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let heads = gradient.meta.shape()[1];
        if heads > MAX_SCORE_HEADS {
            let some = |heads| {
                let gradient = Self::float_slice(gradient.clone(), &[Slice::full(), heads]);
                Self::training_scores_gradient(tokens.clone(), gradient)
            };
            return Self::float_cat(in_groups(heads).map(some).collect(), 0);
        }
        let Some(element) = element_of_all([&tokens]) else {
            return training::scores_gradient::<Self>(tokens, gradient);
        };
        let [tokens, gradient] = [tokens, gradient].map(into_contiguous);
        let shape = [heads, tokens.meta.shape()[2]];
        let out = empty(&tokens, shape, gradient.dtype);
        let [x, d, out_arg] = [&tokens, &gradient, &out].map(binding);
        match linear_scores_gradient(&tokens.client, element, &x, &d, &out_arg) {
            Err(AttentionError::Unsupported { .. }) => {
                training::scores_gradient::<Self>(tokens, gradient)
            }
            result => {
                run_checked(SCORES_BACKWARD, [&out], result);
                out
            }
        }
    }

    fn training_add_squares(sums: FloatTensor<Self>, xs: FloatList<Self>) -> FloatTensor<Self> {
        let Some(element) = element_of_all(&xs.0) else {
            return fallback::add_squares::<Self>(sums, xs);
        };
        let xs = xs.map(into_contiguous);
        let sums = to_write_over(sums);
        let bindings: Vec<_> = xs.0.iter().map(binding).collect();
        match add_squares(&sums.client, element, &bindings, &binding(&sums)) {
            Err(AttentionError::Unsupported { .. }) => fallback::add_squares::<Self>(sums, xs),
            result => done(sums, result),
        }
    }

    fn training_scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        let Some(element) = element_of_all([&x]) else {
            return fallback::scale::<Self>(x, factor);
        };
        let [x, factor] = [x, factor].map(into_contiguous);
        let out = like(&x);
        let [x_arg, by, out_arg] = [&x, &factor, &out].map(binding);
        match scale(&x.client, element, &x_arg, &by, &out_arg) {
            Err(AttentionError::Unsupported { .. }) => fallback::scale::<Self>(x, factor),
            result => done(out, result),
        }
    }

    fn training_adamw(
        parameters: FloatList<Self>,
        gradients: FloatList<Self>,
        moments_1: FloatList<Self>,
        moments_2: FloatList<Self>,
        factor: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatList<Self>, FloatList<Self>, FloatList<Self>) {
        let lists = [parameters, gradients, moments_1, moments_2];
        let Some(element) = element_of_all(lists.iter().flat_map(|list| &list.0)) else {
            return fallback::adamw::<Self>(lists, factor, step).into();
        };
        let [parameters, gradients, moments_1, moments_2] = lists;
        let [parameters, gradients] = [parameters, gradients].map(|list| list.map(into_contiguous));
        let [moments_1, moments_2] = [moments_1, moments_2].map(|list| list.map(to_write_over));
        // A parameter that nothing else reads is written over.
        let new_if_read = |old: &CubeTensor| (!old.can_mut()).then(|| like(old));
        let new: Vec<_> = parameters.0.iter().map(new_if_read).collect();
        let update = |at: usize| ParameterUpdate {
            parameter: binding(&parameters.0[at]),
            gradient: binding(&gradients.0[at]),
            moment_1: binding(&moments_1.0[at]),
            moment_2: binding(&moments_2.0[at]),
            new: new[at].as_ref().map(binding),
        };
        let updates: Vec<_> = (0..parameters.0.len()).map(update).collect();
        let factor = into_contiguous(factor);
        let result = adamw(&factor.client, element, &step, &updates, &binding(&factor));
        if let Err(AttentionError::Unsupported { .. }) = result {
            let lists = [parameters, gradients, moments_1, moments_2];
            return fallback::adamw::<Self>(lists, factor, step).into();
        }
        let results = new.into_iter().zip(parameters.0);
        let new = FloatList(results.map(|(new, old)| new.unwrap_or(old)).collect());
        run_checked(ADAMW, &new.0, result);
        (new, moments_1, moments_2)
    }
}

/// The parts side by side, each copied by the norm's kernel; `None` if it does not take one of them, or a part would not
/// begin at the device's alignment.
fn join_heads(parts: &[CubeTensor]) -> Option<CubeTensor> {
    let first = &parts[0];
    let element = element_of(first.dtype)?;
    let [batch, len, _, head_dim] = first.meta.shape().dims();
    let heads_of = |part: &CubeTensor| part.meta.shape()[2];
    let all: usize = parts.iter().map(heads_of).sum();
    let problem = |part: &CubeTensor| {
        let shape = [batch, len, heads_of(part), head_dim];
        let problem = NormProblem::heads(&shape, None, None, element).ok()?;
        (part.dtype == first.dtype && !problem.is_empty()).then_some(problem)
    };
    let problems = parts.iter().map(problem).collect::<Option<Vec<_>>>()?;
    let alignment = first.client.properties().memory.alignment as usize;
    let head = head_dim * element.size();
    let begins: Vec<_> = (parts.iter())
        .scan(0, |begin, part| {
            Some(std::mem::replace(begin, *begin + heads_of(part) * head))
        })
        .collect();
    if !begins.iter().all(|begin| begin.is_multiple_of(alignment)) {
        return None;
    }
    let out = empty(first, [batch, len, all, head_dim], first.dtype);
    let plain = NormParameters {
        gamma: None,
        table: None,
    };
    for ((part, problem), begin) in parts.iter().zip(&problems).zip(begins) {
        let strides = [len * all * head_dim, head_dim, all * head_dim, 1];
        let to = CubeTensor::new(
            out.client.clone(),
            out.handle.clone().offset_start(begin as u64),
            Metadata::new(problem.out_shape(), strides),
            out.device.clone(),
            out.dtype,
        );
        run(norm_forward(
            &first.client,
            problem,
            addressable(part.clone()),
            &plain,
            to.binding(),
        ));
    }
    run_checked(JOIN, [&out], Ok(()));
    Some(out)
}

/// The element type that the kernels read, if there are tensors and all have it.
fn element_of_all<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> Option<ElementType> {
    let mut dtypes = tensors.into_iter().map(|tensor| tensor.dtype);
    let first = dtypes.next()?;
    element_of(first).filter(|_| dtypes.all(|dtype| dtype == first))
}

/// The tensor, contiguous; a copy if something else reads it (Burn's has rows at multiples of the device's alignment).
fn to_write_over(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() {
        true => tensor,
        false => into_contiguous(tensor.copy()),
    }
}

fn loss_rows(element: ElementType, tensors: [&CubeTensor; 3]) -> LossRows {
    let [logits, targets, normaliser] = tensors.map(binding);
    LossRows {
        element,
        logits,
        targets,
        normaliser,
    }
}

/// Integers as the kernels read them.
fn words(tensor: IntTensor<CubeBackend>) -> CubeTensor {
    let tensor = match tensor.dtype {
        DType::I32 => tensor,
        _ => CubeBackend::int_cast(tensor, IntDType::I32),
    };
    into_contiguous(tensor)
}

/// A new contiguous tensor of this shape and type.
fn like(tensor: &CubeTensor) -> CubeTensor {
    empty(tensor, tensor.meta.shape().clone(), tensor.dtype)
}

fn binding(tensor: &CubeTensor) -> TensorBinding {
    tensor.clone().binding()
}

/// Groups of heads that a kernel has sums for.
fn in_groups(heads: usize) -> impl Iterator<Item = Slice> {
    let firsts = (0..heads).step_by(MAX_SCORE_HEADS);
    firsts.map(move |first| Slice::from(first..heads.min(first + MAX_SCORE_HEADS)))
}

/// Without a check of its own, which would wait once more for each parameter: a failure is that of the step of AdamW that
/// reads the result.
fn done(out: CubeTensor, result: Result<(), AttentionError>) -> CubeTensor {
    run(result);
    out
}

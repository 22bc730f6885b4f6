//! Norms and rotary encoding on the CPU engine.

use super::tensors::{Stored, addressable, buffer, by_element, contiguous, run, tensor, view};
use crate::fallback::product::float_dtype;
use crate::fallback::tensors::{cast, to_f32};
use crate::ops::norm::NormOps;
use crate::spans::span;
use crate::types::{NormGrads, Normed, OptionalFloat};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use flash_dma_cpu::{Element, NormGradients, NormParameters, View};
use flash_dma_problem::NormProblem;

impl NormOps for Flex {
    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let _span = span!("norm_forward", engine = "cpu");
        let shape = x.shape();
        let call = Call::new(Some(x.to_contiguous()), Some(gamma), None, problem);
        // Heads of one token each, or tokens of one head: the order is the same.
        relaid(
            by_element!(call.x().dtype(), E => call.forward::<E>()),
            shape,
        )
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let _span = span!("norm_backward", engine = "cpu");
        let shape = x.shape();
        let call = Call::new(Some(x.to_contiguous()), Some(gamma), None, problem);
        let grad_out = grad_out.to_contiguous();
        let grads = by_element!(grad_out.dtype(), E => call.backward::<E>(&grad_out));
        let gamma = grads.gamma.into_option().expect("there is a norm");
        (relaid(grads.x, shape), gamma)
    }

    fn encode_heads(
        x: FloatTensor<Self>,
        gamma: OptionalFloat<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let _span = span!("norm_forward", engine = "cpu");
        let (gamma, table) = (gamma.into_option(), table.into_option());
        let call = Call::new(Some(addressable(x)), gamma, table, problem);
        by_element!(call.x().dtype(), E => call.forward::<E>()).transpose(1, 2)
    }

    fn encode_heads_backward(
        grad_out: FloatTensor<Self>,
        normed: Normed<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> NormGrads<Self> {
        let _span = span!("norm_backward", engine = "cpu");
        let (x, gamma) = match normed {
            Normed::None => (None, None),
            Normed::Some { x, gamma } => (Some(addressable(x)), Some(gamma)),
        };
        let call = Call::new(x, gamma, table.into_option(), problem);
        let grad_out = addressable(grad_out);
        by_element!(grad_out.dtype(), E => call.backward::<E>(&grad_out))
    }
}

fn relaid(tensor: FlexTensor, shape: Shape) -> FlexTensor {
    tensor.with_layout(burn_flex::Layout::contiguous(shape))
}

/// Tensors of a call in a form the engine can address. With a problem of rows, contiguous tensors of any shape.
struct Call {
    x: Option<FlexTensor>,
    /// f32.
    gamma: Option<FlexTensor>,
    table: Option<FlexTensor>,
    problem: NormProblem,
}

impl Call {
    fn new(
        x: Option<FlexTensor>,
        gamma: Option<FlexTensor>,
        table: Option<FlexTensor>,
        problem: NormProblem,
    ) -> Self {
        Self {
            x,
            gamma: gamma.map(|gamma| to_f32::<Flex>(gamma).to_contiguous()),
            table: table.map(addressable),
            problem,
        }
    }

    fn x(&self) -> &FlexTensor {
        self.x.as_ref().expect("a forward pass has an input")
    }

    fn parameters(&self) -> NormParameters<'_> {
        NormParameters {
            gamma: self.gamma.as_ref().map(contiguous),
            table: self.table.as_ref().map(|table| {
                let View {
                    data,
                    shape: [positions, width, two],
                    strides: [position, feature, one],
                } = view(table);
                // Both features of a pair share its angle.
                View {
                    data,
                    shape: [positions, width / 2, two],
                    strides: [position, 2 * feature, one],
                }
            }),
        }
    }

    /// In the order of `x`: `[batch, len, heads, width]`.
    fn forward<E: Element + Stored>(&self) -> FlexTensor {
        let shape = self.problem.x_shape();
        let mut out = buffer::<E, 4>(shape);
        run(flash_dma_cpu::norm_forward(
            &self.problem,
            rows(self.x(), shape),
            self.parameters(),
            &mut out,
        ));
        tensor(out, shape)
    }

    fn backward<E: Element + Stored>(&self, grad_out: &FlexTensor) -> NormGrads<Flex> {
        let (p, shape) = (&self.problem, self.problem.x_shape());
        let mut x = buffer::<E, 4>(shape);
        let mut gamma = self.gamma.as_ref().map(|_| buffer::<f32, 1>([p.width]));
        run(flash_dma_cpu::norm_backward(
            p,
            self.x.as_ref().map(|x| rows(x, shape)),
            self.parameters(),
            rows(grad_out, p.out_shape()),
            NormGradients {
                x: &mut x,
                gamma: gamma.as_deref_mut(),
            },
        ));
        let gamma = gamma.map(|gamma| cast::<Flex>(tensor(gamma, [p.width]), float_dtype(p.gamma)));
        NormGrads {
            x: tensor(x, shape),
            gamma: OptionalFloat::from_option(gamma),
        }
    }
}

/// View of a tensor of four axes, or of a contiguous one in that shape.
fn rows<E: Element + Stored>(tensor: &FlexTensor, shape: [usize; 4]) -> View<'_, E, 4> {
    if tensor.shape().num_dims() == 4 && tensor.shape().dims::<4>() == shape {
        view(tensor)
    } else {
        View::contiguous(contiguous(tensor), shape)
    }
}

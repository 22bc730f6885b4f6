//! Gradients of a product: the two other products of a linear layer.

use crate::fallback::product as fallback;
use crate::ops::product::ProductOps;
use crate::validate::checked_element;
use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use flash_dma_problem::ElementType;

impl<B: ProductOps, C: CheckpointStrategy> ProductOps for Autodiff<B, C> {
    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let tracked = [&x, &weight].map(|t| t.is_tracked());
        let nodes = [x.node(), weight.node()];
        match LinearProduct.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prep) => prep.finish(B::linear_product(
                x.into_primitive(),
                weight.into_primitive(),
            )),
            OpsKind::Tracked(mut prep) => {
                // Each gradient needs the other factor.
                let state = State {
                    x: tracked[1].then(|| prep.checkpoint(&x)),
                    weight: tracked[0].then(|| prep.checkpoint(&weight)),
                    weight_element: checked_element(weight.dtype()),
                };
                let out = B::linear_product(x.into_primitive(), weight.into_primitive());
                prep.finish(state, out)
            }
        }
    }

    // Burn's operations, and so differentiable: a second derivative is not worth kernels of its own.

    fn linear_product_input_gradient(
        grad: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::input_gradient::<Self>(grad, weight)
    }

    fn linear_product_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        element: ElementType,
    ) -> FloatTensor<Self> {
        fallback::weight_gradient::<Self>(x, grad, element)
    }
}

#[derive(Debug)]
struct LinearProduct;

#[derive(Clone, Debug)]
struct State {
    /// Kept if the weight is tracked.
    x: Option<NodeId>,
    /// Kept if `x` is tracked.
    weight: Option<NodeId>,
    weight_element: ElementType,
}

impl<B: ProductOps> Backward<B, 2> for LinearProduct {
    type State = State;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [x_node, weight_node] = ops.parents;
        let state = ops.state;
        let mut kept = |id: Option<NodeId>| {
            id.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id))
        };
        let (x, weight) = (kept(state.x), kept(state.weight));
        if let (Some(node), Some(weight)) = (x_node, weight) {
            let of_x = B::linear_product_input_gradient(grad.clone(), weight);
            grads.register::<B>(node.id, of_x);
        }
        if let (Some(node), Some(x)) = (weight_node, x) {
            let of_weight = B::linear_product_weight_gradient(x, grad, state.weight_element);
            grads.register::<B>(node.id, of_weight);
        }
    }
}

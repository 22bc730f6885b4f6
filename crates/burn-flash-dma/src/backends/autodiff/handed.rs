//! Gradients passed from one node to another, and operations with several results.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use std::sync::{Arc, Mutex, MutexGuard};

/// A gradient that one node's backward step leaves for another's, which runs later.
///
/// Burn's graph has no node with two outputs. If an operation has several, all of them, or all but one, are nodes on
/// top of the one with the inputs as parents: their backward steps run first and leave their gradients here.
#[derive(Clone, Debug)]
pub(crate) struct HandedGradient<B: Backend>(Arc<Mutex<Option<FloatTensor<B>>>>);

impl<B: Backend> HandedGradient<B> {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    pub(crate) fn put(&self, gradient: FloatTensor<B>) {
        *self.lock() = Some(gradient);
    }

    /// The gradient; `None` if the loss does not depend on that output.
    pub(crate) fn take(&self) -> Option<FloatTensor<B>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<FloatTensor<B>>> {
        self.0.lock().expect("no step panics with the lock held")
    }
}

/// Records the parts of `x`; `join` concatenates their gradients along `axis`.
pub(super) fn record_parts<B: Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    parts: Vec<FloatTensor<B>>,
    join: Join<B>,
    axis: usize,
) -> Vec<FloatTensor<Autodiff<B, C>>> {
    let prep = match Whole.prepare::<C>([x.node()]).compute_bound().stateful() {
        OpsKind::UnTracked(_) => {
            let constants = parts.into_iter().map(Autodiff::<B, C>::from_inner);
            return constants.collect();
        }
        OpsKind::Tracked(prep) => prep,
    };
    let gradients: Vec<_> = parts.iter().map(|_| HandedGradient::<B>::new()).collect();
    let parts_of_x = Parts {
        gradients: gradients.clone(),
        shapes: parts.iter().map(TensorMetadata::shape).collect(),
        join,
        axis,
        device: x.device(),
        dtype: x.dtype().into(),
    };
    let whole = prep.finish(parts_of_x, x.into_primitive());
    let part = |(part, gradient)| handed::<B, C>(&whole, part, gradient);
    parts.into_iter().zip(gradients).map(part).collect()
}

/// Records a result of the operation of `whole` that leaves its gradient there.
pub(super) fn handed<B: Backend, C: CheckpointStrategy>(
    whole: &FloatTensor<Autodiff<B, C>>,
    result: FloatTensor<B>,
    gradient: HandedGradient<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let node = Handing.prepare::<C>([whole.node()]).compute_bound();
    match node.stateful() {
        OpsKind::UnTracked(prep) => prep.finish(result),
        OpsKind::Tracked(prep) => prep.finish(gradient, result),
    }
}

type Join<B> = fn(Vec<FloatTensor<B>>, usize) -> FloatTensor<B>;

#[derive(Clone, Debug)]
struct Parts<B: Backend> {
    gradients: Vec<HandedGradient<B>>,
    shapes: Vec<Shape>,
    join: Join<B>,
    axis: usize,
    device: B::Device,
    dtype: FloatDType,
}

#[derive(Debug)]
struct Whole;

impl<B: Backend> Backward<B, 1> for Whole {
    type State = Parts<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let parts = ops.state;
        let of_part = |(gradient, shape): (&HandedGradient<B>, Shape)| {
            let zeros = || B::float_zeros(shape, &parts.device, parts.dtype);
            gradient.take().unwrap_or_else(zeros)
        };
        let gradients = parts.gradients.iter().zip(parts.shapes);
        let gradients = gradients.map(of_part).collect();
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, (parts.join)(gradients, parts.axis));
        }
    }
}

/// A result that leaves its gradient for the node of its operation.
#[derive(Debug)]
pub(super) struct Handing;

impl<B: Backend> Backward<B, 1> for Handing {
    type State = HandedGradient<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        ops.state.put(grads.consume::<B>(&ops.node));
    }
}

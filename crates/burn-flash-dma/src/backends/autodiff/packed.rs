//! The gradients of the parts of one tensor, joined.

use super::handed::HandedGradient;
use super::node::first_order;
use super::training::Part;
use crate::ops::packed::PackedOps;
use crate::ops::types::{OptionalFloat, PackedRows};
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use flash_dma_problem::TensorName;
use std::marker::PhantomData;

impl<B: PackedOps, C: CheckpointStrategy> PackedOps for Autodiff<B, C> {
    fn packed_split(x: FloatTensor<Self>) -> PackedRows<Self> {
        let parts = B::packed_split(x.primitive().clone()).into_parts();
        let node = Joined::<B>(PhantomData);
        let prep = match node.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::UnTracked(_) => {
                let constants = parts.into_iter().map(Self::from_inner);
                return PackedRows::from_parts(constants.collect());
            }
            OpsKind::Tracked(prep) => prep,
        };
        let gradients: Vec<_> = parts.iter().map(|_| HandedGradient::<B>::new()).collect();
        let state = Parts {
            gradients: gradients.clone(),
            shape: parts[0].shape(),
            device: x.device(),
            dtype: x.dtype().into(),
        };
        let whole = prep.finish(state, x.into_primitive());
        let part =
            |(part, gradient)| match Part.prepare::<C>([whole.node()]).compute_bound().stateful() {
                OpsKind::UnTracked(prep) => prep.finish(part),
                OpsKind::Tracked(prep) => prep.finish(gradient, part),
            };
        PackedRows::from_parts(parts.into_iter().zip(gradients).map(part).collect())
    }

    fn packed_join(rows: PackedRows<Self>) -> FloatTensor<Self> {
        first_order([
            (
                TensorName::Query,
                matches!(&rows.q, OptionalFloat::Some(q) if q.is_tracked()),
            ),
            (TensorName::Key, rows.k.is_tracked()),
            (TensorName::Value, rows.v.is_tracked()),
        ]);
        Self::from_inner(B::packed_join(PackedRows {
            q: rows.q.map(|q| q.into_primitive()),
            k: rows.k.into_primitive(),
            v: rows.v.into_primitive(),
        }))
    }
}

/// What the gradients of the parts are until there are all.
#[derive(Clone, Debug)]
struct Parts<B: PackedOps> {
    gradients: Vec<HandedGradient<B>>,
    /// Of each part.
    shape: Shape,
    device: B::Device,
    dtype: FloatDType,
}

/// The node of the whole tensor, below those of its parts.
#[derive(Debug)]
struct Joined<B>(PhantomData<B>);

impl<B: PackedOps> Backward<B, 1> for Joined<B> {
    type State = Parts<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let state = ops.state;
        let of_part = |gradient: &HandedGradient<B>| {
            let zeros = || B::float_zeros(state.shape.clone(), &state.device, state.dtype);
            gradient.take().unwrap_or_else(zeros)
        };
        let rows = PackedRows::from_parts(state.gradients.iter().map(of_part).collect());
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::packed_join(rows));
        }
    }
}

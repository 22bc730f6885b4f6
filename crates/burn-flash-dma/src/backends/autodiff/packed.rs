//! Gradients of the parts of one tensor, joined.

use super::handed::record_parts;
use super::node::first_order;
use crate::ops::packed::PackedOps;
use crate::types::PackedRows;
use burn::backend::AutodiffBackend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use flash_dma_problem::TensorName;

impl<B: PackedOps, C: CheckpointStrategy> PackedOps for Autodiff<B, C> {
    fn packed_split(x: FloatTensor<Self>) -> PackedRows<Self> {
        let parts = B::packed_split(x.primitive().clone()).into_parts();
        let join = |parts, _| B::packed_join(PackedRows::from_parts(parts));
        PackedRows::from_parts(record_parts::<B, C>(x, parts, join, 2))
    }

    fn packed_join(rows: PackedRows<Self>) -> FloatTensor<Self> {
        let of_q = rows.q.as_option().is_some_and(|q| q.is_tracked());
        first_order([
            (TensorName::Query, of_q),
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

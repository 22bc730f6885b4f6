//! The parts of one packed tensor.

use super::OptionalFloat;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

/// Parts of one tensor, `[batch, heads, len, head_dim]` each.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PackedRows<B: Backend> {
    /// Present exactly if there are three parts.
    #[extension_type]
    pub q: OptionalFloat<B>,
    /// The last part but one.
    pub k: FloatTensor<B>,
    /// The last part.
    pub v: FloatTensor<B>,
}

impl<B: Backend> PackedRows<B> {
    /// Of two or three parts.
    pub(crate) fn from_parts(mut parts: Vec<FloatTensor<B>>) -> Self {
        let mut last = || parts.pop().expect("two or three parts");
        let (v, k) = (last(), last());
        Self {
            q: OptionalFloat::from_option(parts.pop()),
            k,
            v,
        }
    }

    /// The parts in their order.
    pub(crate) fn into_parts(self) -> Vec<FloatTensor<B>> {
        let q = self.q.into_option();
        q.into_iter().chain([self.k, self.v]).collect()
    }
}

//! A gradient on its way from one node to another.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use std::sync::{Arc, Mutex, MutexGuard};

/// A gradient that one node's backward step leaves for another's, which runs later.
///
/// Burn's graph has no node with two outputs. Where an operation has several, all but one of them, or all, are nodes on
/// top of the one that has the inputs as parents: their backward steps run first and leave their gradients here.
#[derive(Clone, Debug)]
pub(crate) struct HandedGradient<B: Backend>(Arc<Mutex<Option<FloatTensor<B>>>>);

impl<B: Backend> HandedGradient<B> {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    /// Leaves the gradient.
    pub(crate) fn put(&self, gradient: FloatTensor<B>) {
        *self.lock() = Some(gradient);
    }

    /// The gradient, `None` if the loss does not depend on that output.
    pub(crate) fn take(&self) -> Option<FloatTensor<B>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<FloatTensor<B>>> {
        self.0.lock().expect("no step panics with the lock held")
    }
}

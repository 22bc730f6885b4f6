//! Attention over the logits as f32 rounds them.
//!
//! An additive mask of -1e9 moves logits to where f32 has one number in 64, and differences between keys are lost
//! before any softmax. An engine can be held only to the attention over the logits that are left, whose error does not
//! grow with their size.

use crate::masked::{MaskedBackward, MaskedInputs};
use crate::rows::{self, Logits, Tensors};
use crate::{Backward, Exact, Forward, Inputs};

/// Inputs whose logits are `f32(f32(softcap(scale · q·k)) + bias)`; everything after them is f64.
#[derive(Clone, Copy, Debug)]
pub struct Rounded<'a, T>(&'a T);

impl Inputs {
    /// The same inputs, over the logits as f32 rounds them.
    #[must_use]
    pub fn rounded(&self) -> Rounded<'_, Self> {
        Rounded(self)
    }
}

impl MaskedInputs {
    /// The same inputs, over the logits as f32 rounds them.
    #[must_use]
    pub fn rounded(&self) -> Rounded<'_, Self> {
        Rounded(self)
    }
}

fn rounded(tensors: Tensors<'_>) -> Tensors<'_> {
    Tensors {
        logits: Logits::Rounded,
        ..tensors
    }
}

impl Rounded<'_, Inputs> {
    /// [`Inputs::forward`] over rounded logits.
    #[must_use]
    pub fn forward(&self) -> Forward {
        rows::forward(&rounded(self.0.tensors()), &self.0.selected())
    }

    /// [`Inputs::backward`] over rounded logits.
    #[must_use]
    pub fn backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> Backward {
        let tensors = rounded(self.0.tensors());
        self.0.backward_of(&tensors, (grad_out, grad_lse))
    }

    /// [`Inputs::rank_gradient`] over rounded logits.
    #[must_use]
    pub fn rank_gradient(
        &self,
        runners_up: usize,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        let (tensors, grads) = (rounded(self.0.tensors()), (grad_out, grad_lse));
        self.0.rank_gradient_of(&tensors, runners_up, grads)
    }

    /// [`Inputs::left_out_gradient`] over rounded logits.
    #[must_use]
    pub fn left_out_gradient(
        &self,
        from: &[u32],
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        let (tensors, grads) = (rounded(self.0.tensors()), (grad_out, grad_lse));
        self.0.left_out_gradient_of(&tensors, from, grads)
    }
}

impl Rounded<'_, MaskedInputs> {
    /// [`MaskedInputs::forward`] over rounded logits.
    #[must_use]
    pub fn forward(&self) -> Forward {
        rows::forward(&rounded(self.0.tensors()), self.0)
    }

    /// [`MaskedInputs::backward`] over rounded logits.
    #[must_use]
    pub fn backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> MaskedBackward {
        let tensors = rounded(self.0.tensors());
        self.0.backward_of(&tensors, (grad_out, grad_lse))
    }
}

//! A factor on a gradient.

use crate::validate::at_least_zero;
use burn::tensor::Tensor;
use flash_dma_problem::AttentionError;

/// A factor on the gradient that passes through a tensor, which stays as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct GradientScale(f32);

impl GradientScale {
    /// # Errors
    ///
    /// [`AttentionError::GradientScale`] if it is negative or, as f32, not finite.
    pub(super) fn try_new(scale: f64) -> Result<Self, AttentionError> {
        let factor = at_least_zero(scale).ok_or(AttentionError::GradientScale { scale })?;
        Ok(Self(factor))
    }

    /// The tensor, whose gradient is this times that of the result.
    pub(super) fn applied<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if self.0 == 1.0 || !x.device().is_autodiff() {
            return x;
        }
        let value = x.clone().detach();
        if self.0 == 0.0 {
            return value;
        }
        // The difference is 0 whatever the type, so that no rounding can change a selection.
        (x - value.clone()) * self.0 + value
    }
}

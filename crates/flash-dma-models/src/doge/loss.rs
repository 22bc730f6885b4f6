//! What training asks of the model.

use super::model::Doge;
use crate::nn::{TokenInput, expect};
#[cfg(feature = "train")]
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
#[cfg(feature = "train")]
use burn_flash_dma::train::SelectionInput;

impl Doge {
    /// The mean cross-entropy, `[1]` in nats per token, of the tokens `targets` `[batch, len]` that follow those of the
    /// input. Padding does not count; of no tokens it is 0.
    ///
    /// # Panics
    ///
    /// If [`try_loss`](Self::try_loss) returns an error, with that error's text.
    #[must_use]
    pub fn loss(&self, input: impl Into<TokenInput>, targets: Tensor<2, Int>) -> Tensor<1> {
        expect(self.try_loss(input, targets))
    }

    /// Like [`loss`](Self::loss), but returns the error.
    ///
    /// # Errors
    ///
    /// Those of [`try_token_losses`](Self::try_token_losses).
    pub fn try_loss(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, AttentionError> {
        self.stack().loss(input.into(), targets)
    }

    /// The cross-entropy of each token, `[batch, len]` in f32 and nats: to leave some of them out, such as the first of
    /// a document, or to weight them.
    ///
    /// # Errors
    ///
    /// Those of [`try_forward`](Self::try_forward), and [`AttentionError::Shape`] if the targets are not as many as the
    /// tokens.
    pub fn try_token_losses(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<2>, AttentionError> {
        self.stack().token_losses(input.into(), targets)
    }

    /// The [`loss`](Self::loss), and what every layer selects, for the metric of selections.
    ///
    /// # Errors
    ///
    /// Those of [`try_token_losses`](Self::try_token_losses).
    #[cfg(feature = "train")]
    pub fn try_loss_and_selections(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
    ) -> Result<(Tensor<1>, SelectionInput), AttentionError> {
        self.stack().loss_and_selections(input.into(), targets)
    }

    /// The gradients of all scores' parameters, for the metric of selections.
    #[cfg(feature = "train")]
    #[must_use]
    pub fn score_gradients(&self, gradients: &GradientsParams) -> SelectionInput {
        self.stack().score_gradients(gradients)
    }
}

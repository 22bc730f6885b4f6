//! What training asks of a [`Decoder`].

use super::decoder::{Activations, Decoder};
use super::expect;
use super::input::TokenInput;
use super::loss::{check_targets, lengths, losses, mean};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::Checkpointed;
#[cfg(feature = "train")]
use burn_flash_dma::train::SelectionInput;

/// The backward pass of a loss: the gradients of all parameters.
pub type Backward<'a> = Box<dyn FnOnce() -> GradientsParams + 'a>;

impl Decoder {
    /// The mean cross-entropy, `[1]` in nats per token, of the tokens `targets` `[batch, len]` that follow those of the
    /// input. Padding does not count; of no tokens it is 0.
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

    /// The cross-entropy of each token, `[batch, len]` in f32 and nats.
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

    /// The [loss](Self::try_loss), each token's times its weight `[batch, len]` if there are any, and what computes the
    /// gradients of all parameters once it is called, as [`Activations`] says.
    ///
    /// # Errors
    ///
    /// Those of [`try_token_losses`](Self::try_token_losses).
    ///
    /// # Panics
    ///
    /// In place of an error where activations are recomputed.
    pub fn try_loss_and_backward(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
    ) -> Result<(Tensor<1>, Backward<'_>), AttentionError> {
        let input = input.into();
        check_targets(&input, &targets)?;
        let (stack, lengths) = (self.stack(), lengths(&input));
        let loss = |logits| {
            let losses = losses(logits, targets);
            let losses = match weights {
                Some(weights) => losses * weights,
                None => losses,
            };
            mean(losses, lengths)
        };
        if self.config.activations == Activations::Kept {
            let loss = loss(stack.logits(input, |_, _, _| Ok(()))?);
            let kept = loss.clone();
            let backward = move || GradientsParams::from_grads(kept.backward(), self);
            return Ok((loss, Box::new(backward)));
        }
        let TokenInput { tokens, sequences } = input;
        let x = stack.embed(tokens);
        let blocks = Checkpointed::forward(&self.blocks, x, move |block, x, selections| {
            // The copies for a block are made again, too.
            let block = stack.computing(block);
            expect(block.try_forward_selecting(x, &sequences, selections))
        });
        let loss = loss(stack.unembed(blocks.output())?);
        let kept = loss.clone();
        Ok((loss, Box::new(move || blocks.backward(&kept, self))))
    }

    /// The loss, and what every layer selects, for the metric of selections.
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

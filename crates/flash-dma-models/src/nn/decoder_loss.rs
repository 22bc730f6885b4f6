//! Losses of a [`Decoder`] and their backward pass.

use super::decoder::{Activations, Decoder};
use super::expect;
use super::input::TokenInput;
use super::loss::{Targets, check_targets};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::Checkpointed;

/// Backward pass of a loss: computes the gradients of all parameters.
pub type Backward<'a> = Box<dyn FnOnce() -> GradientsParams + 'a>;

impl Decoder {
    /// The [loss](Self::try_loss), optionally with weights `[batch, len]` per token, and its backward pass, which
    /// keeps or recomputes activations according to [`Activations`].
    ///
    /// # Errors
    ///
    /// See [`try_token_losses`](Self::try_token_losses).
    ///
    /// # Panics
    ///
    /// Instead of an error if activations are recomputed.
    pub fn try_loss_and_backward(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
    ) -> Result<(Tensor<1>, Backward<'_>), AttentionError> {
        let input = input.into();
        check_targets(&input, &targets)?;
        let (stack, lengths) = (self.stack(), input.sequences.lengths.clone());
        let of = Targets {
            targets,
            weights,
            lengths,
        };
        if self.config.activations == Activations::Kept {
            let x = stack.features(input, |_, _, _| Ok(()))?;
            let loss = stack.mean_loss(x, of)?;
            let kept = loss.clone();
            let backward = move || GradientsParams::from_grads(kept.backward(), self);
            return Ok((loss, Box::new(backward)));
        }
        let TokenInput { tokens, sequences } = input;
        let x = stack.embed(tokens);
        let blocks = Checkpointed::forward(&self.blocks, x, move |block, x, selections| {
            expect(block.try_forward_selecting(x, &sequences, selections))
        });
        let loss = stack.mean_loss(blocks.output(), of)?;
        let kept = loss.clone();
        Ok((loss, Box::new(move || blocks.backward(&kept, self))))
    }
}

//! What training asks of the model.

use super::model::Doge;
use crate::nn::{TokenInput, expect};
#[cfg(feature = "train")]
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
#[cfg(feature = "train")]
use burn_flash_dma::train::SelectionInput;
use burn_flash_dma::train::token_losses;
use burn_flash_dma::{AttentionError, TensorName};

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
        let input = input.into();
        let lengths = input.sequences.given_lengths().map(<[usize]>::to_vec);
        let losses = self.try_token_losses(input, targets)?;
        Ok(mean(losses, lengths))
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
        let input = input.into();
        check_targets(&input, &targets)?;
        let logits = self.logits(input, |_, _, _| {})?;
        Ok(losses(logits, targets))
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
        let input = input.into();
        let lengths = input.sequences.given_lengths().map(<[usize]>::to_vec);
        check_targets(&input, &targets)?;
        let mut selections = SelectionInput::new();
        let logits = self.logits(input, |block, x, sequences| {
            let x = block.attention_norm.forward(x.clone().detach());
            let layer = std::mem::take(&mut selections);
            selections = layer.layer(&block.attention, sequences.input(x));
        })?;
        Ok((mean(losses(logits, targets), lengths), selections))
    }

    /// The gradients of all scores' parameters, for the metric of selections.
    #[cfg(feature = "train")]
    #[must_use]
    pub fn score_gradients(&self, gradients: &GradientsParams) -> SelectionInput {
        let layers = self.blocks.iter().map(|block| &block.attention);
        layers.fold(SelectionInput::new(), |input, layer| {
            input.gradients_in(layer.scorer(), gradients)
        })
    }
}

/// Refuses targets that are not those of the tokens.
fn check_targets(input: &TokenInput, targets: &Tensor<2, Int>) -> Result<(), AttentionError> {
    let (expected, actual) = (input.tokens.dims(), targets.dims());
    match (0..2).find(|&axis| expected[axis] != actual[axis]) {
        None => Ok(()),
        Some(axis) => Err(AttentionError::Shape {
            tensor: TensorName::Targets,
            axis,
            expected: expected[axis],
            actual: actual[axis],
        }),
    }
}

/// The cross-entropy of each token, `[batch, len]`.
fn losses(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
    let shape = targets.dims();
    if shape.contains(&0) {
        // Burn's `flatten` of no tokens has another shape.
        return logits.cast(DType::F32).sum_dim(2).reshape(shape);
    }
    token_losses(logits.flatten(0, 1), targets.flatten(0, 1)).reshape(shape)
}

/// The mean over all tokens but padding; 0 if there are none.
fn mean(losses: Tensor<2>, lengths: Option<Vec<usize>>) -> Tensor<1> {
    let [batch, len] = losses.dims();
    if batch * len == 0 {
        return losses.sum();
    }
    let Some(lengths) = lengths else {
        return losses.mean();
    };
    let padding = lengths
        .iter()
        .flat_map(|&length| (0..len).map(move |place| place >= length));
    let padding = TensorData::new(padding.collect::<Vec<bool>>(), [batch, len]);
    let padding = Tensor::<2, Bool>::from_data(padding, &losses.device());
    let count: usize = lengths.iter().sum();
    losses.mask_fill(padding, 0.0).sum() / count.max(1) as f64
}

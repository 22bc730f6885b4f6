//! Losses of whole models, and inputs of the metric of selections.

use super::input::TokenInput;
use super::stack::Stack;
#[cfg(feature = "train")]
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
#[cfg(feature = "train")]
use burn_flash_dma::train::SelectionInput;
use burn_flash_dma::train::{sum_losses, token_losses};
use burn_flash_dma::{AttentionError, TensorName};

impl Stack<'_> {
    /// Mean cross-entropy, `[1]`, over the tokens without padding.
    pub fn loss(
        self,
        input: TokenInput,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, AttentionError> {
        let lengths = input.sequences.lengths.clone();
        Ok(mean(self.token_losses(input, targets)?, lengths))
    }

    /// Cross-entropy of each token, `[batch, len]`.
    pub fn token_losses(
        self,
        input: TokenInput,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<2>, AttentionError> {
        check_targets(&input, &targets)?;
        let logits = self.logits(input, |_, _, _| Ok(()))?;
        Ok(losses(logits, targets))
    }

    // ANCHOR: selections
    /// The loss, and every layer's selection.
    #[cfg(feature = "train")]
    pub fn loss_and_selections(
        self,
        input: TokenInput,
        targets: Tensor<2, Int>,
    ) -> Result<(Tensor<1>, SelectionInput), AttentionError> {
        let lengths = input.sequences.lengths.clone();
        check_targets(&input, &targets)?;
        let mut selections = SelectionInput::new();
        let logits = self.logits(input, |block, x, sequences| {
            let x = block.attention_norm.forward(x.clone().detach());
            let layer = std::mem::take(&mut selections);
            selections = layer.layer(&block.attention, sequences.input(x));
            Ok(())
        })?;
        Ok((mean(losses(logits, targets), lengths), selections))
    }

    /// Adds the gradients of the parameters of all scores.
    #[cfg(feature = "train")]
    pub fn score_gradients(self, gradients: &GradientsParams) -> SelectionInput {
        let layers = self.blocks.iter().map(|block| &block.attention);
        layers.fold(SelectionInput::new(), |input, layer| {
            input.gradients_in(layer.scorer(), gradients)
        })
    }
    // ANCHOR_END: selections
}

/// Refuses targets whose shape differs from that of the tokens.
pub(super) fn check_targets(
    input: &TokenInput,
    targets: &Tensor<2, Int>,
) -> Result<(), AttentionError> {
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

/// Cross-entropy of each token, `[batch, len]`.
pub(super) fn losses(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
    let shape = targets.dims();
    if shape.contains(&0) {
        // Burn's `flatten` of an empty tensor has another shape.
        return logits.cast(DType::F32).sum_dim(2).reshape(shape);
    }
    token_losses(logits.flatten(0, 1), targets.flatten(0, 1)).reshape(shape)
}

/// Mean over the tokens without padding; 0 if there are none.
pub(super) fn mean(losses: Tensor<2>, lengths: Option<Vec<usize>>) -> Tensor<1> {
    let [batch, len] = losses.dims();
    if batch * len == 0 {
        return losses.sum();
    }
    let Some(lengths) = lengths else {
        return sum_losses(losses.flatten(0, 1)) / (batch * len) as f64;
    };
    let row = |&length: &usize| (0..len).map(move |place| place >= length);
    let padding = lengths.iter().flat_map(row);
    let padding = TensorData::new(padding.collect::<Vec<bool>>(), [batch, len]);
    let padding = Tensor::<2, Bool>::from_data(padding, &losses.device());
    let count: usize = lengths.iter().sum();
    sum_losses(losses.mask_fill(padding, 0.0).flatten(0, 1)) / count.max(1) as f64
}

//! Losses of whole models, and inputs of the metric of selections.

use super::input::TokenInput;
use super::normalised;
use super::stack::Stack;
#[cfg(feature = "train")]
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
#[cfg(feature = "train")]
use burn_flash_dma::train::SelectionInput;
use burn_flash_dma::train::{Unembedding, linear_cross_entropy, sum_losses, token_losses};
use burn_flash_dma::{AttentionError, TensorName};

/// Numbers of logits past which they are made of some tokens at a time: 128 MiB in 16 bits.
const WHOLE_LOGITS: usize = 1 << 26;

/// The tokens that follow, `[batch, len]`, and which of them count.
pub(crate) struct Targets {
    pub targets: Tensor<2, Int>,
    /// `[batch, len]`.
    pub weights: Option<Tensor<2>>,
    /// Tokens of each sequence without padding.
    pub lengths: Option<Vec<usize>>,
}

impl Stack<'_> {
    /// Mean cross-entropy, `[1]`, over the tokens without padding.
    pub fn loss(
        self,
        input: TokenInput,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, AttentionError> {
        let lengths = input.sequences.lengths.clone();
        check_targets(&input, &targets)?;
        let x = self.features(input, |_, _, _| Ok(()))?;
        self.mean_loss(
            x,
            Targets {
                targets,
                weights: None,
                lengths,
            },
        )
    }

    /// Mean cross-entropy, `[1]`, over the tokens without padding, from the output of the last block.
    pub fn mean_loss(self, x: Tensor<3>, targets: Targets) -> Result<Tensor<1>, AttentionError> {
        self.mean_loss_within(WHOLE_LOGITS, x, targets)
    }

    /// [`mean_loss`](Self::mean_loss), with all logits at once if these are at most `whole` numbers.
    fn mean_loss_within(
        self,
        whole: usize,
        x: Tensor<3>,
        of: Targets,
    ) -> Result<Tensor<1>, AttentionError> {
        let [batch, len] = of.targets.dims();
        let has_bias = self.unembedding.is_some_and(|layer| layer.bias.is_some());
        if batch * len * self.vocabulary() <= whole || has_bias {
            let losses = losses(self.unembed(x)?, of.targets);
            let losses = match of.weights {
                Some(weights) => losses * weights,
                None => losses,
            };
            return Ok(mean(losses, of.lengths));
        }
        let x = normalised(self.norm, x)?;
        let weight = match self.unembedding {
            Some(layer) => Unembedding::Linear(layer.weight.val()),
            None => Unembedding::Embedding(self.embedding.weight.val()),
        };
        let options = (&x.device().without_autodiff(), DType::F32);
        let weights = of
            .weights
            .unwrap_or_else(|| Tensor::ones([batch, len], options));
        let (weights, count) = match &of.lengths {
            None => (weights, batch * len),
            Some(lengths) => {
                let padding = padding(lengths, len, &weights.device());
                (weights.mask_fill(padding, 0.0), lengths.iter().sum())
            }
        };
        let (x, targets) = (x.flatten(0, 1), of.targets.flatten(0, 1));
        let sum = linear_cross_entropy(x, weight, targets, weights.flatten(0, 1));
        Ok(sum / count.max(1) as f64)
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
        let x = self.features(input, |block, x, sequences| {
            let x = normalised(&block.attention_norm, x.clone().detach())?;
            let layer = std::mem::take(&mut selections);
            selections = layer.layer(&block.attention, sequences.input(x));
            Ok(())
        })?;
        let of = Targets {
            targets,
            weights: None,
            lengths,
        };
        Ok((self.mean_loss(x, of)?, selections))
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
fn losses(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
    let shape = targets.dims();
    if shape.contains(&0) {
        // Burn's `flatten` of an empty tensor has another shape.
        return logits.cast(DType::F32).sum_dim(2).reshape(shape);
    }
    token_losses(logits.flatten(0, 1), targets.flatten(0, 1)).reshape(shape)
}

/// Mean over the tokens without padding; 0 if there are none.
fn mean(losses: Tensor<2>, lengths: Option<Vec<usize>>) -> Tensor<1> {
    let [batch, len] = losses.dims();
    if batch * len == 0 {
        return losses.sum();
    }
    let Some(lengths) = lengths else {
        return sum_losses(losses.flatten(0, 1)) / (batch * len) as f64;
    };
    let padding = padding(&lengths, len, &losses.device());
    let count: usize = lengths.iter().sum();
    sum_losses(losses.mask_fill(padding, 0.0).flatten(0, 1)) / count.max(1) as f64
}

/// True at tokens of padding, `[batch, len]`.
fn padding(lengths: &[usize], len: usize, device: &Device) -> Tensor<2, Bool> {
    let row = |&length: &usize| (0..len).map(move |place| place >= length);
    let padding = lengths.iter().flat_map(row).collect::<Vec<bool>>();
    Tensor::from_data(TensorData::new(padding, [lengths.len(), len]), device)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::nn::DecoderConfig;
    use burn::tensor::Distribution;
    use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Selection};

    /// Sequences of which some tokens are padding, and some count more than others.
    #[test]
    fn a_loss_in_parts_is_that_of_all_logits() {
        let device = Device::flex().autodiff();
        let attention = DynamicMaskAttentionConfig::new(16, 2).with_selection(Selection::keep(4));
        let model = DecoderConfig::new(attention, 1).init(&device);
        let [batch, len] = [2, 9];
        let tokens = |seed: usize| {
            let tokens = (0..batch * len).map(|at| ((at * 31 + seed) % 256) as i32);
            let tokens = TensorData::new(tokens.collect(), [batch, len]);
            Tensor::<2, Int>::from_data(tokens, &device)
        };
        let weights: Tensor<2> = Tensor::random(
            [batch, len],
            Distribution::Uniform(0.5, 1.5),
            &device.clone().without_autodiff(),
        );
        for lengths in [None, Some(vec![9, 4])] {
            for weights in [None, Some(weights.clone())] {
                let run = |whole: usize| {
                    let input = TokenInput::from(tokens(1));
                    let stack = model.stack();
                    let x = stack.features(input, |_, _, _| Ok(())).unwrap();
                    let of = Targets {
                        targets: tokens(8),
                        weights: weights.clone(),
                        lengths: lengths.clone(),
                    };
                    let loss = stack.mean_loss_within(whole, x, of).unwrap();
                    let grads = loss.backward();
                    let table = model.embedding.weight.val().grad(&grads).unwrap();
                    let norm = model.norm.gamma.val().grad(&grads).unwrap();
                    let numbers = [loss.into_data(), table.into_data(), norm.into_data()];
                    numbers.map(|data| data.iter::<f64>().collect::<Vec<_>>())
                };
                let (parts, whole) = (run(0), run(usize::MAX));
                for (parts, whole) in parts.iter().flatten().zip(whole.iter().flatten()) {
                    assert!(
                        (parts - whole).abs() <= 1e-6 * (1.0 + whole.abs()),
                        "{parts}, not {whole}"
                    );
                }
            }
        }
    }
}

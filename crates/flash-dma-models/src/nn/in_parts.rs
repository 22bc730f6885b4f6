//! The gradient of a sequence of any length, in parts.

use super::decoder::Decoder;
use super::input::TokenInput;
use super::loss::{Targets, check_targets};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::try_in_parts;
use std::ops::Range;

impl Decoder {
    /// The [loss](Self::try_loss) of `tokens` `[batch, len]`, optionally with weights, and the gradients of all parameters, in
    /// parts of `part` tokens (the last may be shorter): those of a pass over the whole sequence, up to rounding.
    ///
    /// The memory is that of a step of `part` tokens, and for every further part and layer the keys and values of as many tokens
    /// as a query keeps and has runners-up. The parts before the last are computed twice. See
    /// [`try_in_parts`].
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if a layer cannot be read in parts, [`AttentionError::Shape`] if tokens and targets
    /// differ in number.
    ///
    /// # Panics
    ///
    /// If `part` is 0.
    pub fn try_loss_and_gradients_in_parts(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
        part: usize,
    ) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
        assert!(part > 0, "parts of no token");
        check_targets(&TokenInput::from(tokens.clone()), &targets)?;
        let [_, len] = tokens.dims();
        let range = |number: usize| (number * part)..len.min((number + 1) * part);
        let of = |all: &Tensor<2, Int>, number: usize| {
            let range = range(number);
            all.clone().narrow(1, range.start, range.len())
        };
        try_in_parts(
            self,
            len.div_ceil(part).max(1),
            |model, number, layers| {
                let mut x = model.stack().embed(of(&tokens, number));
                for block in &model.blocks {
                    x = block.try_forward_with(x, |layer, x| layers.try_attend(layer, x))?;
                }
                Ok(x)
            },
            |model, number, x| {
                let Range { start, end } = range(number);
                let weights = weights.clone();
                let targets = Targets {
                    targets: of(&targets, number),
                    weights: weights.map(|all| all.narrow(1, start, end - start)),
                    lengths: None,
                };
                let share = (end - start) as f64 / len.max(1) as f64;
                Ok(model.stack().mean_loss(x, targets)? * share)
            },
        )
    }
}

//! The gradient of a sequence of any length, in parts.

use super::decoder::Decoder;
use super::input::TokenInput;
use super::loss::{Targets, check_targets};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::{StreamedLayers, add_gradients};
use std::ops::Range;

impl Decoder {
    /// The [loss](Self::try_loss) of `tokens` `[batch, len]`, optionally with weights, and the gradients of all parameters, in
    /// parts of `part` tokens (the last may be shorter): those of a pass over the whole sequence, up to rounding.
    ///
    /// The memory is that of a step of `part` tokens, and for every further part and layer the keys and values of as many tokens
    /// as a query keeps and has runners-up. The parts before the last are computed twice. See
    /// [`StreamedLayers`](burn_flash_dma::train::StreamedLayers).
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
        let [batch, len] = tokens.dims();
        let of = |range: &Range<usize>, all: &Tensor<2, Int>| {
            all.clone().narrow(1, range.start, range.len())
        };
        let ends = (0..len.max(1)).step_by(part);
        let parts: Vec<_> = ends.map(|start| start..len.min(start + part)).collect();
        let layers = || self.blocks.iter().map(|block| &block.attention);
        let device = self.embedding.weight.val().device();
        let mut streamed = StreamedLayers::try_new(layers(), batch, self.config.dtype, &device)?;

        let (_, before_last) = parts.split_last().expect("a part");
        let untracked = self.clone().no_grad();
        for range in before_last {
            streamed.begin_part();
            untracked.features_of_part(of(range, &tokens), &mut streamed)?;
        }
        let mut gradients = GradientsParams::new();
        let mut losses = Vec::with_capacity(parts.len());
        for (number, range) in parts.iter().enumerate().rev() {
            streamed.begin_backward(number);
            let x = self.features_of_part(of(range, &tokens), &mut streamed)?;
            let weights = weights.clone();
            let of = Targets {
                targets: of(range, &targets),
                weights: weights.map(|all| all.narrow(1, range.start, range.len())),
                lengths: None,
            };
            let loss = self.stack().mean_loss(x, of)? * (range.len() as f64 / len.max(1) as f64);
            losses.push(loss.clone().detach());
            let loss = match streamed.asked() {
                Some(asked) => loss + asked,
                None => loss,
            };
            let mut grads = loss.backward();
            let of_scores = streamed.try_take_gradients(layers(), &mut grads)?;
            add_gradients(self, grads, &mut gradients);
            if let Some(zero) = of_scores {
                add_gradients(self, zero.backward(), &mut gradients);
            }
        }
        if let Some(zero) = streamed.try_charged(layers())? {
            add_gradients(self, zero.backward(), &mut gradients);
        }
        Ok((Tensor::cat(losses, 0).sum(), gradients))
    }

    fn features_of_part(
        &self,
        tokens: Tensor<2, Int>,
        streamed: &mut StreamedLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        let mut x = self.stack().embed(tokens);
        for block in &self.blocks {
            x = block.try_forward_with(x, |layer, x| streamed.try_attend(layer, x))?;
        }
        Ok(x)
    }
}

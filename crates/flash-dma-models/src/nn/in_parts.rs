//! The gradient of sequences of any length, in parts.

use super::block::DecoderBlock;
use super::decoder::Decoder;
use super::input::TokenInput;
use super::loss::{Targets, check_targets};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::{DeviceGroup, PartLayers, Parts, StepInParts, send, try_in_parts};
use std::ops::Range;

impl Decoder {
    /// The [loss](Self::try_loss) of sequences `[batch, len]`, optionally with weights, and the gradients of all parameters, in
    /// parts of `part` tokens (the last may be shorter): those of a pass over the whole sequences, up to rounding. Documents may
    /// begin and end anywhere.
    ///
    /// The memory is that of a step of `part` tokens, and for every further part and layer the keys and values of as many tokens
    /// as a query keeps and has runners-up. The parts before the last are computed twice. See [`try_in_parts`].
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if a layer cannot be read in parts or there is padding, [`AttentionError::Shape`] if tokens
    /// and targets differ in number, or errors of the documents.
    ///
    /// # Panics
    ///
    /// If `part` is 0 or there is no token, or autodiff does not track the model.
    pub fn try_loss_and_gradients_in_parts(
        &self,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
        part: usize,
    ) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
        let (step, parts) = cut(input.into(), targets, weights, |[batch, len]| {
            Parts::new(batch, len, part)
        })?;
        try_in_parts(
            self,
            &parts,
            |model, range, layers| {
                let mut x = step.input(model, range)?;
                for block in &model.blocks {
                    x = block.try_forward_with(x, |layer, x| layers.try_attend(layer, x))?;
                }
                Ok(x)
            },
            |model, range, x| step.loss(model, range, x),
        )
    }

    /// The [loss](Self::try_loss) of sequences `[batch, len]`, optionally with weights, and the gradients of all parameters, on the
    /// model's device: those of a pass over the whole sequences, up to rounding. Each device of the group has a part of every
    /// sequence, as long as those of the others, or a token longer. Documents may begin and end anywhere. See [`DeviceGroup`].
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if a layer cannot be read in parts, there is padding or are fewer tokens than devices,
    /// [`AttentionError::Shape`] if tokens and targets differ in number, [`AttentionError::Group`] if a device fails, or errors
    /// of the documents.
    ///
    /// # Panics
    ///
    /// If there is no sequence, or autodiff does not track the model.
    pub fn try_loss_and_gradients_over(
        &self,
        group: &mut DeviceGroup,
        input: impl Into<TokenInput>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
    ) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
        let (input, devices) = (input.into(), group.devices().len());
        let [_, len] = input.tokens.dims();
        if len < devices {
            let what = format!("sequences of {len} tokens on {devices} devices");
            return Err(AttentionError::Unsupported { what });
        }
        let (step, parts) = cut(input, targets, weights, |[batch, len]| {
            Parts::even(batch, len, devices)
        })?;
        let mut model = self.clone();
        for block in &mut model.blocks {
            block.attention = block.attention.without_rotary_table();
        }
        group.try_gradients(&model, &parts, &step)
    }
}

/// A step over sequences `[batch, len]`, and where they are cut.
fn cut(
    input: TokenInput,
    targets: Tensor<2, Int>,
    weights: Option<Tensor<2>>,
    parts: impl FnOnce([usize; 2]) -> Parts,
) -> Result<(Step, Parts), AttentionError> {
    check_targets(&input, &targets)?;
    let TokenInput { tokens, sequences } = input;
    if sequences.lengths.is_some() {
        let what = "padding in sequences that are read in parts".to_owned();
        return Err(AttentionError::Unsupported { what });
    }
    let mut parts = parts(tokens.dims());
    if let Some(documents) = sequences.documents {
        parts = parts.try_with_documents(documents)?;
    }
    let step = Step {
        tokens,
        targets,
        weights,
    };
    Ok((step, parts))
}

/// Tokens, their targets and the weights of their losses, `[batch, len]`.
#[derive(Clone)]
struct Step {
    tokens: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    weights: Option<Tensor<2>>,
}

impl StepInParts<Decoder> for Step {
    type Block = DecoderBlock;

    fn to_device(&self, device: &Device) -> Self {
        let Self {
            tokens,
            targets,
            weights,
        } = self.clone();
        Self {
            tokens: send(tokens, device),
            targets: send(targets, device),
            weights: weights.map(|weights| send(weights, device)),
        }
    }

    fn input(&self, model: &Decoder, range: Range<usize>) -> Result<Tensor<3>, AttentionError> {
        let tokens = self.tokens.clone().narrow(1, range.start, range.len());
        Ok(model.stack().embed(tokens))
    }

    fn blocks<'a>(&self, model: &'a Decoder) -> &'a [DecoderBlock] {
        &model.blocks
    }

    fn block(
        &self,
        block: &DecoderBlock,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        block.try_forward_apart(x, |layer, x| layers.try_attend(layer, x))
    }

    fn loss(
        &self,
        model: &Decoder,
        range: Range<usize>,
        x: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError> {
        let [_, len] = self.tokens.dims();
        let (start, count) = (range.start, range.len());
        let weights = self.weights.clone();
        let of = Targets {
            targets: self.targets.clone().narrow(1, start, count),
            weights: weights.map(|all| all.narrow(1, start, count)),
            lengths: None,
        };
        Ok(model.stack().mean_loss(x, of)? * (count as f64 / len as f64))
    }
}

//! The gradient of sequences of any length, in parts.

use super::decoder::Decoder;
use super::input::TokenInput;
use super::loss::{Targets, check_targets};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::{Parts, try_in_parts};

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
        let input = input.into();
        check_targets(&input, &targets)?;
        let TokenInput { tokens, sequences } = input;
        if sequences.lengths.is_some() {
            let what = "padding in sequences that are read in parts".to_owned();
            return Err(AttentionError::Unsupported { what });
        }
        let [batch, len] = tokens.dims();
        let mut parts = Parts::new(batch, len, part);
        if let Some(documents) = sequences.documents {
            parts = parts.try_with_documents(documents)?;
        }
        try_in_parts(
            self,
            &parts,
            |model, range, layers| {
                let tokens = tokens.clone().narrow(1, range.start, range.len());
                let mut x = model.stack().embed(tokens);
                for block in &model.blocks {
                    x = block.try_forward_with(x, |layer, x| layers.try_attend(layer, x))?;
                }
                Ok(x)
            },
            |model, range, x| {
                let (start, count) = (range.start, range.len());
                let weights = weights.clone();
                let of = Targets {
                    targets: targets.clone().narrow(1, start, count),
                    weights: weights.map(|all| all.narrow(1, start, count)),
                    lengths: None,
                };
                Ok(model.stack().mean_loss(x, of)? * (count as f64 / len as f64))
            },
        )
    }
}

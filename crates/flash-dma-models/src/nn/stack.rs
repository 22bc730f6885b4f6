//! The parts shared by whole models: an embedding, blocks, a norm, and logits.

use super::block::DecoderBlock;
use super::input::{Sequences, TokenInput};
use super::normalised;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::{AttentionError, try_linear, try_product};

#[derive(Clone, Copy)]
pub(crate) struct Stack<'a> {
    pub embedding: &'a Embedding,
    pub blocks: &'a [DecoderBlock],
    pub norm: &'a RmsNorm,
    /// If `None`, the transposed embedding makes the logits.
    pub unembedding: Option<&'a Linear>,
    /// The type of the activations. The parameters may be of f32: products round weights, other operations read them as they
    /// are. An update of a 16-bit parameter would mostly be rounded away.
    pub dtype: FloatDType,
}

impl Stack<'_> {
    /// Logits in the type of the activations; `see` gets each block, its input, and the sequences.
    pub fn logits(
        self,
        input: TokenInput,
        see: impl FnMut(&DecoderBlock, &Tensor<3>, &Sequences) -> Result<(), AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        self.unembed(self.features(input, see)?)
    }

    /// The output of the last block; `see` as in [`logits`](Self::logits).
    pub fn features(
        self,
        input: TokenInput,
        mut see: impl FnMut(&DecoderBlock, &Tensor<3>, &Sequences) -> Result<(), AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let TokenInput { tokens, sequences } = input;
        let mut x = self.embed(tokens);
        for block in self.blocks {
            see(block, &x, &sequences)?;
            x = block.try_forward(x, &sequences)?;
        }
        Ok(x)
    }

    /// Classes of the logits.
    pub fn vocabulary(self) -> usize {
        match self.unembedding {
            Some(layer) => layer.weight.dims()[1],
            None => self.embedding.weight.dims()[0],
        }
    }

    /// Vectors of tokens, in the type of the activations.
    pub fn embed(self, tokens: Tensor<2, Int>) -> Tensor<3> {
        #[cfg(feature = "autodiff")]
        return burn_flash_dma::train::embed(self.embedding, tokens, self.dtype);
        #[cfg(not(feature = "autodiff"))]
        return self.embedding.forward(tokens).cast(self.dtype);
    }

    /// Logits from the output of the last block.
    pub fn unembed(self, x: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        let x = normalised(self.norm, x)?;
        match self.unembedding {
            Some(layer) => try_linear(layer, x),
            None => try_product(x, self.embedding.weight.val().transpose()),
        }
    }

    /// An empty cache per block.
    pub fn caches(self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        let cache = |block: &DecoderBlock| block.attention.try_init_cache(sequences);
        self.blocks.iter().map(cache).collect()
    }

    /// [`LanguageModel::try_read`](crate::LanguageModel::try_read) of a model whose longest sequence is `limit`.
    pub fn read(
        self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
        limit: Option<usize>,
    ) -> Result<Tensor<3>, AttentionError> {
        let [sequences, len] = tokens.dims();
        assert_eq!(caches.len(), self.blocks.len(), "the number of caches");
        within("the number of rows of logits", rows, len)?;
        if let (Some(limit), Some(cache)) = (limit, caches.first()) {
            let longest = cache.lengths().iter().copied().max().unwrap_or(0);
            let what = "the number of tokens with rotary positions";
            within(what, longest + len, limit)?;
        }
        let mut x = self.embed(tokens);
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.try_forward_cached(x, cache)?;
        }
        if rows == 0 {
            let shape = [sequences, 0, self.vocabulary()];
            return Ok(Tensor::zeros(shape, (&x.device(), DType::F32)));
        }
        let logits = self.unembed(x.narrow(1, len - rows, rows))?;
        Ok(logits.cast(FloatDType::F32))
    }
}

/// Methods of a whole model, from the parts that its method `stack` returns; the rest of its [`crate::LanguageModel`]
/// follows.
macro_rules! whole_model {
    ($model:ty { $($item:item)* }) => {
        impl $model {
            /// Logits of the token that follows each token, `[batch, len, vocabulary]` in f32. Takes a tensor
            /// `[batch, len]` of tokens, or a [`TokenInput`](crate::nn::TokenInput).
            ///
            /// # Panics
            ///
            /// If [`try_forward`](Self::try_forward) returns an error, with that error's text.
            #[must_use]
            pub fn forward(&self, input: impl Into<crate::nn::TokenInput>) -> Tensor<3> {
                crate::nn::expect(self.try_forward(input))
            }

            /// Like [`forward`](Self::forward), but returns the error. Tokens are on the device and not checked: the
            /// backend decides what happens to one outside the vocabulary.
            ///
            /// # Errors
            ///
            /// [`AttentionError`] if the sequences are longer than the rotary tables, or the lengths or the documents
            /// do not fit.
            pub fn try_forward(
                &self,
                input: impl Into<crate::nn::TokenInput>,
            ) -> Result<Tensor<3>, AttentionError> {
                let logits = self.stack().logits(input.into(), |_, _, _| Ok(()))?;
                Ok(logits.cast(FloatDType::F32))
            }
        }

        #[cfg(feature = "autodiff")]
        impl $model {
            /// Mean cross-entropy, `[1]` in nats per token, of `targets` `[batch, len]`, the tokens that follow those
            /// of the input. Excludes padding; 0 without tokens.
            ///
            /// # Errors
            ///
            /// See [`try_token_losses`](Self::try_token_losses).
            pub fn try_loss(
                &self,
                input: impl Into<crate::nn::TokenInput>,
                targets: Tensor<2, Int>,
            ) -> Result<Tensor<1>, AttentionError> {
                self.stack().loss(input.into(), targets)
            }

            /// Cross-entropy of each token, `[batch, len]` in f32 and nats, for weighting tokens or leaving some out,
            /// such as the first of a document.
            ///
            /// # Errors
            ///
            /// Errors of [`try_forward`](Self::try_forward), and [`AttentionError::Shape`] if tokens and targets
            /// differ in number.
            pub fn try_token_losses(
                &self,
                input: impl Into<crate::nn::TokenInput>,
                targets: Tensor<2, Int>,
            ) -> Result<Tensor<2>, AttentionError> {
                self.stack().token_losses(input.into(), targets)
            }

            /// The [loss](Self::try_loss) and every layer's selection, for the metric of selections.
            ///
            /// # Errors
            ///
            /// See [`try_token_losses`](Self::try_token_losses).
            #[cfg(feature = "train")]
            pub fn try_loss_and_selections(
                &self,
                input: impl Into<crate::nn::TokenInput>,
                targets: Tensor<2, Int>,
            ) -> Result<(Tensor<1>, burn_flash_dma::train::SelectionInput), AttentionError> {
                self.stack().loss_and_selections(input.into(), targets)
            }

            /// Gradients of the parameters of all scores, for the metric of selections.
            #[cfg(feature = "train")]
            #[must_use]
            pub fn score_gradients(
                &self,
                gradients: &burn::optim::GradientsParams,
            ) -> burn_flash_dma::train::SelectionInput {
                self.stack().score_gradients(gradients)
            }
        }

        impl crate::LanguageModel for $model {
            $($item)*

            fn device(&self) -> Device {
                self.embedding.weight.val().device()
            }

            fn try_init_caches(
                &self,
                sequences: usize,
            ) -> Result<Vec<AttentionCache>, AttentionError> {
                self.stack().caches(sequences)
            }

            /// # Errors
            ///
            /// [`AttentionError::TooLarge`] if a sequence exceeds [`max_len`](crate::LanguageModel::max_len) or there
            /// are more `rows` than tokens, before anything is computed; or those of
            /// [`DynamicMaskAttention::try_forward_cached`](burn_flash_dma::nn::DynamicMaskAttention::try_forward_cached),
            /// for example if autodiff tracks the parameters.
            ///
            /// # Panics
            ///
            /// If the numbers of caches and blocks differ.
            fn try_read(
                &self,
                tokens: Tensor<2, Int>,
                rows: usize,
                caches: &mut [AttentionCache],
            ) -> Result<Tensor<3>, AttentionError> {
                self.stack().read(tokens, rows, caches, crate::LanguageModel::max_len(self))
            }
        }
    };
}
pub(crate) use whole_model;

fn within(what: &'static str, size: usize, limit: usize) -> Result<(), AttentionError> {
    match size <= limit {
        true => Ok(()),
        false => Err(AttentionError::TooLarge { what, size, limit }),
    }
}

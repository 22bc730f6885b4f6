//! The Doge model.

use super::config::{DogeConfig, RopeScaling};
use super::error::ModelError;
use crate::nn::{DecoderBlock, Routing, Stack, cast, expect, whole_model};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;

/// A causal language model of the Doge family: tokens in, logits of the next token out.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use flash_dma_models::doge::DogeConfig;
///
/// let device = Device::flex();
/// let model = DogeConfig::new(32, 2, 4)
///     .with_kv_heads(Some(2))
///     .with_vocab_size(100)
///     .with_keep_window_size(16)
///     .init(&device);
/// let tokens = Tensor::<1, Int>::arange(0..40, &device).reshape([2, 20]);
/// assert_eq!(model.forward(tokens).dims(), [2, 20, 100]);
/// # }
/// ```
///
/// # Element types
///
/// Activations have the type of [`with_dtype`](Self::with_dtype), initially f32 or the type the parameters were read
/// in. Parameters may have another type, in which their gradients arrive: f32 parameters and bf16
/// activations are the usual way to train. [`for_generation`](Self::for_generation) casts the parameters for good.
#[derive(Module, Debug)]
pub struct Doge {
    /// `[vocab_size, hidden_size]`.
    pub embedding: Embedding,
    /// Blocks, in order.
    pub blocks: Vec<DecoderBlock>,
    /// Norm before the logits.
    pub norm: RmsNorm,
    /// `[hidden_size, vocab_size]`; if `None`, the transposed embedding makes the logits.
    pub unembedding: Option<Linear>,
    #[module(skip)]
    config: DogeConfig,
    #[module(skip)]
    dtype: FloatDType,
}

impl DogeConfig {
    /// Creates the model with new parameters on a device.
    ///
    /// # Panics
    ///
    /// If [`try_init`](Self::try_init) returns an error, with that error's text.
    #[must_use]
    pub fn init(&self, device: &Device) -> Doge {
        expect(self.try_init(device))
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`ModelError::Config`] if a size is 0 or a token goes to more experts than there are, or
    /// [`ModelError::Attention`] if the attention layer refuses the heads, the window or the epsilon.
    pub fn try_init(&self, device: &Device) -> Result<Doge, ModelError> {
        self.check()?;
        Doge::new(self, device)
    }
}

impl Doge {
    pub(super) fn new(config: &DogeConfig, device: &Device) -> Result<Self, ModelError> {
        let block = config.block();
        let blocks: Result<Vec<_>, _> =
            (0..config.layers).map(|_| block.try_init(device)).collect();
        let initializer = config.initializer();
        Ok(Self {
            blocks: blocks?,
            embedding: EmbeddingConfig::new(config.vocab_size, config.hidden_size)
                .with_initializer(initializer.clone())
                .init(device),
            norm: RmsNormConfig::new(config.hidden_size)
                .with_epsilon(config.rms_norm_eps)
                .init(device),
            unembedding: (!config.tie_word_embeddings).then(|| {
                LinearConfig::new(config.hidden_size, config.vocab_size)
                    .with_bias(false)
                    .with_initializer(initializer)
                    .init(device)
            }),
            config: config.clone(),
            dtype: FloatDType::F32,
        })
    }

    /// Configuration of the model.
    #[must_use]
    pub fn config(&self) -> &DogeConfig {
        &self.config
    }

    /// Element type of the activations.
    #[must_use]
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// The model with activations of another element type and unchanged parameters.
    #[must_use]
    pub fn with_dtype(mut self, dtype: FloatDType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The model with another routing of its experts, if it has any.
    #[must_use]
    pub fn with_routing(mut self, routing: Routing) -> Self {
        if let Some(experts) = &mut self.config.experts {
            experts.routing = routing;
        }
        for block in &mut self.blocks {
            if let Some(experts) = &mut block.feed_forward.experts {
                experts.set_routing(routing);
            }
        }
        self
    }

    /// The model for generation: [merged](Self::merged), and with parameters in the type of the activations.
    #[must_use]
    pub fn for_generation(&self) -> Self {
        cast(&self.merged(), self.dtype)
    }

    /// Mean cross-entropy, `[1]`: see [`try_loss`](Self::try_loss).
    ///
    /// # Panics
    ///
    /// If [`try_loss`](Self::try_loss) returns an error, with that error's text.
    #[cfg(feature = "autodiff")]
    #[must_use]
    pub fn loss(
        &self,
        input: impl Into<crate::nn::TokenInput>,
        targets: Tensor<2, Int>,
    ) -> Tensor<1> {
        crate::nn::expect(self.try_loss(input, targets))
    }

    pub(super) fn stack(&self) -> Stack<'_> {
        Stack {
            embedding: &self.embedding,
            blocks: &self.blocks,
            norm: &self.norm,
            unembedding: self.unembedding.as_ref(),
            dtype: self.dtype,
        }
    }
}

whole_model!(Doge {
    fn vocabulary(&self) -> usize {
        self.config.vocab_size
    }

    fn max_len(&self) -> Option<usize> {
        match self.config.rope_scaling {
            RopeScaling::Plain => None,
            RopeScaling::Dynamic(_) => Some(self.config.max_position_embeddings),
        }
    }

    /// Up to the end of the rotary tables.
    fn replays_up_to(&self) -> usize {
        self.config.max_position_embeddings
    }
});

//! Inputs of a model.

use burn::tensor::{Int, Tensor};
use burn_flash_dma::Documents;
use burn_flash_dma::nn::DynamicMaskInput;

/// Lengths and documents of a batch's sequences, if any; the same for every layer of a model.
#[derive(Clone, Debug, Default)]
pub struct Sequences {
    pub(super) lengths: Option<Vec<usize>>,
    pub(super) documents: Option<Documents>,
}

impl Sequences {
    /// Sequences without padding, of one document each.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of tokens of each sequence: see [`DynamicMaskInput::lengths`].
    #[must_use]
    pub fn lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.lengths = Some(lengths.into());
        self
    }

    /// Documents packed into each sequence: see [`DynamicMaskInput::documents`].
    #[must_use]
    pub fn documents(mut self, documents: Documents) -> Self {
        self.documents = Some(documents);
        self
    }

    /// Input of an attention layer.
    pub fn input(&self, x: Tensor<3>) -> DynamicMaskInput {
        let mut input = DynamicMaskInput::new(x);
        if let Some(lengths) = &self.lengths {
            input = input.lengths(lengths.clone());
        }
        if let Some(documents) = &self.documents {
            input = input.documents(documents.clone());
        }
        input
    }
}

/// Input of a language model: tokens, and optionally lengths and documents. A plain tensor is an input without
/// padding, of one document per sequence.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Int, Tensor};
/// # use flash_dma_models::doge::DogeConfig;
/// # use flash_dma_models::nn::TokenInput;
/// use burn_flash_dma::Documents;
///
/// # let device = Device::flex();
/// # let model = DogeConfig::new(32, 2, 2).with_vocab_size(100).init(&device);
/// let tokens = Tensor::<1, Int>::arange(0..20, &device).reshape([2, 10]);
/// // Two documents in the first sequence, one in the second.
/// let documents = Documents::from_lengths([vec![4, 6], vec![10]]);
/// let logits = model.forward(TokenInput::new(tokens).documents(documents));
/// assert_eq!(logits.dims(), [2, 10, 100]);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a model takes it"]
pub struct TokenInput {
    pub(crate) tokens: Tensor<2, Int>,
    pub(crate) sequences: Sequences,
}

impl TokenInput {
    /// Tokens `[batch, len]`, none of them padding.
    pub fn new(tokens: Tensor<2, Int>) -> Self {
        Self {
            tokens,
            sequences: Sequences::new(),
        }
    }

    /// Number of tokens of each sequence; the rest is padding, whose logits mean nothing.
    pub fn lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.sequences = self.sequences.lengths(lengths);
        self
    }

    /// Documents packed into each sequence: a token sees only its own document.
    pub fn documents(mut self, documents: Documents) -> Self {
        self.sequences = self.sequences.documents(documents);
        self
    }
}

impl From<Tensor<2, Int>> for TokenInput {
    fn from(tokens: Tensor<2, Int>) -> Self {
        Self::new(tokens)
    }
}

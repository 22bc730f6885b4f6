//! What a layer attends over: tokens, and which of them are padding.

use crate::validate::check_shape;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use flash_dma_problem::{AttentionError, TensorName};

/// The input of [`DynamicMaskAttention`](super::DynamicMaskAttention): tokens, and what is known about them. A plain
/// tensor is an input without padding.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Distribution, Tensor};
/// # use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput};
/// let device = Device::flex();
/// let layer = DynamicMaskAttentionConfig::new(32, 4).with_keep_window(Some(8)).init(&device);
/// let x = Tensor::<3>::random([2, 20, 32], Distribution::Normal(0.0, 1.0), &device);
/// // The second sequence has 13 tokens and seven of padding.
/// let out = layer.forward(DynamicMaskInput::new(x).lengths([20, 13]));
/// assert_eq!(out.dims(), [2, 20, 32]);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer takes it"]
pub struct DynamicMaskInput {
    x: Tensor<3>,
    lengths: Option<Vec<usize>>,
}

impl DynamicMaskInput {
    /// Tokens `[batch, len, d_model]`, all of which count.
    pub fn new(x: Tensor<3>) -> Self {
        Self { x, lengths: None }
    }

    /// The number of tokens of each sequence of the batch, up to `len`; what stands behind them is padding. No query
    /// attends to padding, the outputs of padding are zeros, and what it holds (NaN included) reaches no output and no
    /// gradient. The other rows are those of the sequence without its padding.
    pub fn lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.lengths = Some(lengths.into());
        self
    }

    /// The shape of the tokens.
    pub(super) fn dims(&self) -> [usize; 3] {
        self.x.dims()
    }

    /// The tokens with zeros for padding, and where the padding is.
    pub(super) fn try_into_parts(self) -> Result<(Tensor<3>, Padding), AttentionError> {
        let [batch, len, _] = self.x.dims();
        let Some(lengths) = self.lengths else {
            return Ok((self.x, Padding(None)));
        };
        check_shape(TensorName::Lengths, &[lengths.len()], &[batch])?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > len {
            return Err(AttentionError::TooLarge {
                what: "the length of a sequence",
                size: longest,
                limit: len,
            });
        }
        if lengths.iter().all(|&length| length == len) {
            return Ok((self.x, Padding(None)));
        }
        let device = self.x.device();
        let ends: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let ends = TensorData::new(ends, [batch, 1]);
        let ends = Tensor::<2, Int>::from_data(ends, (&device, DType::I32)).expand([batch, len]);
        let places = Tensor::<1, Int>::arange(0..len as i64, (&device, DType::I32));
        let places = places.reshape([1, len]).expand([batch, len]);
        let padding = Padding(Some(places.greater_equal(ends)));
        Ok((padding.zeroed(self.x), padding))
    }
}

impl From<Tensor<3>> for DynamicMaskInput {
    fn from(x: Tensor<3>) -> Self {
        Self::new(x)
    }
}

/// The tokens that are padding, `[batch, len]`; `None` if there are none.
#[derive(Clone, Debug)]
pub(super) struct Padding(Option<Tensor<2, Bool>>);

impl Padding {
    /// `[batch, len, features]` with zeros for padding. A fill, not a product: 0 times NaN is NaN.
    pub(super) fn zeroed(&self, tokens: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            None => tokens,
            Some(padding) => {
                let shape = tokens.dims();
                let padding = padding.clone().unsqueeze_dim::<3>(2).expand(shape);
                tokens.mask_fill(padding, 0.0)
            }
        }
    }

    /// Scores `[batch, kv_heads, len]` with −∞ for padding: nothing attends to it.
    pub(super) fn hidden(&self, scores: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            None => scores,
            Some(padding) => {
                let shape = scores.dims();
                let padding = padding.clone().unsqueeze_dim::<3>(1).expand(shape);
                scores.mask_fill(padding, f32::NEG_INFINITY)
            }
        }
    }
}

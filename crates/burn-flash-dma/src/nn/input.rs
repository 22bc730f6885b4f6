//! The input of a layer: tokens, which of them are padding, and where documents end.

use crate::documents::Documents;
use crate::fallback::running::arange;
use crate::fallback::tensors::ints;
use crate::mask::polarity::AttentionMask;
use crate::validate::{at_most, check_shape, same_device};
use burn::tensor::{Bool, DType, Device, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

/// Input of [`DynamicMaskAttention`](super::DynamicMaskAttention): tokens, and optionally lengths, documents and a
/// mask. A plain tensor is one document per sequence without padding.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Distribution, Tensor};
/// # use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, Selection};
/// let device = Device::flex();
/// let layer = DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8)).init(&device);
/// let x = Tensor::<3>::random([2, 20, 32], Distribution::Normal(0.0, 1.0), &device);
/// // The second sequence has 13 tokens and seven of padding.
/// let out = layer.forward(DynamicMaskInput::new(x).lengths([20, 13]));
/// assert_eq!(out.dims(), [2, 20, 32]);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer takes it"]
pub struct DynamicMaskInput {
    pub(super) x: Tensor<3>,
    lengths: Option<Vec<usize>>,
    pub(super) documents: Option<Documents>,
    mask: Option<AttentionMask>,
}

impl DynamicMaskInput {
    /// Tokens `[batch, len, d_model]`, none of them padding.
    pub fn new(x: Tensor<3>) -> Self {
        Self {
            x,
            lengths: None,
            documents: None,
            mask: None,
        }
    }

    /// Number of tokens of each sequence, up to `len`. The rest is padding, whose outputs are zeros; its contents,
    /// NaN included, reach no other output and no gradient.
    pub fn lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.lengths = Some(lengths.into());
        self
    }

    /// Documents packed into each sequence. Tokens attend only to their own document, as if it stood alone (only
    /// differences of rotary positions count). Needs a causal layer. Their lengths add up to `len`: padding after the
    /// [`lengths`](Self::lengths) is one more document, or part of the last.
    pub fn documents(mut self, documents: Documents) -> Self {
        self.documents = Some(documents);
        self
    }

    /// Restricts further which keys each query sees, `[batch | 1, n_kv_heads | 1, len | 1, len | 1]`.
    /// [`AttentionMask::visible`] and [`AttentionMask::hidden`] say what `true` means; the masks of Burn's attention
    /// modules hide.
    ///
    /// A hidden key is not a candidate, but uses up its place among the recent ones. Use [`lengths`](Self::lengths)
    /// for padding, on which no output and no gradient may depend.
    ///
    /// - A mask per key, with size 1 on the query axis (Burn's `mask_pad`, as `[batch, 1, 1, len]`), costs nothing:
    ///   the scores of hidden keys become −∞.
    /// - With any other mask (Burn's `mask_attn`, as `[batch, 1, len, len]`) the layer selects per pair and calls
    ///   [`MaskedAttention`](crate::MaskedAttention): O(len²) memory, and no gradients for runners-up; a layer
    ///   configured to have some refuses the mask in training.
    pub fn mask(mut self, mask: AttentionMask) -> Self {
        self.mask = Some(mask);
        self
    }

    pub(crate) fn tokens(&self) -> &Tensor<3> {
        &self.x
    }

    /// True if the mask differs between queries.
    pub(super) fn has_pairs(&self) -> bool {
        (self.mask.as_ref()).is_some_and(|mask| mask.dims()[2] != 1)
    }

    /// The tokens, with zeros for padding.
    pub(super) fn try_into_tokens(self, kv_heads: usize) -> Result<Tokens, AttentionError> {
        let shape @ [batch, len, _] = self.x.dims();
        let (mut hidden_keys, mut pairs) = (None, None);
        if let Some(mask) = self.mask {
            check_mask(&mask, [batch, kv_heads, len, len])?;
            same_device(&self.x.device(), TensorName::Mask, mask.device())?;
            match mask.dims()[2] {
                // An empty sequence has nothing to hide.
                _ if batch * len == 0 => {}
                1 => hidden_keys = Some(mask.into_visible().bool_not().squeeze_dim(2)),
                _ => pairs = Some(mask),
            }
        }
        let padding = match self.lengths {
            Some(lengths) => padding(&lengths, shape, &self.x.device())?,
            None => None,
        };
        let mut tokens = Tokens {
            x: self.x,
            padding,
            documents: self.documents,
            hidden_keys,
            pairs,
        };
        tokens.x = tokens.zeroed(tokens.x.clone());
        Ok(tokens)
    }
}

/// Refuses a mask that does not broadcast to the pairs of a layer.
fn check_mask(mask: &AttentionMask, pairs: [usize; 4]) -> Result<(), AttentionError> {
    for (axis, (actual, size)) in mask.dims().into_iter().zip(pairs).enumerate() {
        if actual != 1 && actual != size {
            return Err(AttentionError::Broadcast {
                tensor: TensorName::Mask,
                axis,
                sizes: vec![size],
                actual,
            });
        }
    }
    Ok(())
}

/// The padding of sequences of these lengths, `[batch, len]`; `None` if there is none.
fn padding(
    lengths: &[usize],
    [batch, len, _]: [usize; 3],
    device: &Device,
) -> Result<Option<Tensor<2, Bool>>, AttentionError> {
    check_shape(TensorName::Lengths, &[lengths.len()], &[batch])?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    at_most("the length of a sequence", longest, len)?;
    if lengths.iter().all(|&length| length == len) {
        return Ok(None);
    }
    let ends = lengths.iter().map(|&length| length as i32).collect();
    let ends = ints(ends, [batch, 1], device).expand([batch, len]);
    let places = arange(0..len as i64, (device, DType::I32));
    let places = places.reshape([1, len]).expand([batch, len]);
    Ok(Some(places.greater_equal(ends)))
}

impl From<Tensor<3>> for DynamicMaskInput {
    fn from(x: Tensor<3>) -> Self {
        Self::new(x)
    }
}

pub(super) struct Tokens {
    /// `[batch, len, d_model]`, zeros for padding.
    pub(super) x: Tensor<3>,
    /// The padding, `[batch, len]`; `None` if there is none.
    padding: Option<Tensor<2, Bool>>,
    pub(super) documents: Option<Documents>,
    /// Keys that no query sees, `[batch | 1, kv_heads | 1, len | 1]`.
    hidden_keys: Option<Tensor<3, Bool>>,
    /// A mask that differs between queries.
    pub(super) pairs: Option<AttentionMask>,
}

impl Tokens {
    /// `[batch, len, features]` with zeros for padding. A fill, as 0 times NaN is NaN.
    pub(super) fn zeroed(&self, tokens: Tensor<3>) -> Tensor<3> {
        match &self.padding {
            // Burn cannot expand to an empty axis.
            Some(padding) if !tokens.dims().contains(&0) => {
                let shape = tokens.dims();
                let padding = padding.clone().unsqueeze_dim::<3>(2).expand(shape);
                tokens.mask_fill(padding, 0.0)
            }
            _ => tokens,
        }
    }

    /// Scores `[batch, kv_heads, len]` with −∞ for padding and hidden keys.
    pub(super) fn hidden(&self, scores: Tensor<3>) -> Tensor<3> {
        let shape = scores.dims();
        let padding = self.padding.clone().map(|t| t.unsqueeze_dim::<3>(1));
        let hidden = padding.into_iter().chain(self.hidden_keys.clone());
        hidden.fold(scores, |scores, keys| {
            scores.mask_fill(keys.expand(shape), f32::NEG_INFINITY)
        })
    }
}

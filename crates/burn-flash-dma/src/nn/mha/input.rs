//! The input, with the fields of Burn's.

use crate::fallback::tensors::reshaped;
use crate::mask::polarity::AttentionMask;
use burn::tensor::{Bool, Device, Tensor, kind::Basic};

/// Input of [`MultiHeadAttention`](super::MultiHeadAttention), like Burn's: queries, keys, values, and masks whose
/// `true` hides.
#[derive(Clone, Debug)]
#[must_use = "a layer takes it"]
pub struct MhaInput {
    pub(super) query: Tensor<3>,
    pub(super) key: Tensor<3>,
    pub(super) value: Tensor<3>,
    pub(super) hidden: Hidden,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Hidden {
    /// `[batch | 1, k_len]`, `true` hides.
    pub(super) pad: Option<Tensor<2, Bool>>,
    /// `[batch | 1, q_len, k_len]`, `true` hides.
    pub(super) attn: Option<Tensor<3, Bool>>,
    pub(super) causal: bool,
}

impl MhaInput {
    /// Attention of a sequence, `[batch, len, d_model]`, over itself.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Attention of `query`, `[batch, q_len, d_model]`, over `key` and `value`, `[batch, k_len, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            hidden: Hidden::default(),
        }
    }

    /// Hides the keys where the mask is `true` from every query: `[batch, k_len]`.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.hidden.pad = Some(mask_pad);
        self
    }

    /// Hides a key from a query where the mask is `true`: `[batch, q_len, k_len]`.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.hidden.attn = Some(mask_attn);
        self
    }

    /// Hides the keys after `i + k_len − q_len` from query `i`: the pairs of Burn's `generate_autoregressive_mask`,
    /// without a mask. Burn's input has no such method.
    pub fn causal(mut self) -> Self {
        self.hidden.causal = true;
        self
    }
}

impl Hidden {
    /// Both masks as one, causal masking aside.
    pub(super) fn mask(&self) -> Option<AttentionMask> {
        let pad = self.pad.clone().map(|pad| {
            let [batch, k_len] = pad.dims();
            reshaped(pad, [batch, 1, 1, k_len])
        });
        let attn = self.attn.clone().map(|attn| {
            let [batch, q_len, k_len] = attn.dims();
            reshaped(attn, [batch, 1, q_len, k_len])
        });
        let masks = pad.into_iter().chain(attn).map(AttentionMask::hidden);
        masks.reduce(AttentionMask::and)
    }

    /// `true` for every hidden pair, `[batch | 1, 1, q_len | 1, k_len]`; `None` if there is none.
    pub(super) fn pairs(&self, lengths: [usize; 2], device: &Device) -> Option<Tensor<4, Bool>> {
        let causal = (self.causal).then(|| AttentionMask::causal(lengths, device));
        let masks = self.mask().into_iter().chain(causal);
        let mask = masks.reduce(AttentionMask::and)?;
        Some(mask.into_visible().bool_not())
    }

    pub(super) fn rows_from(mut self, first: usize) -> Self {
        self.attn = self.attn.map(|attn| rows_from(attn, first));
        self
    }
}

pub(super) fn rows_from<K: Basic>(tensor: Tensor<3, K>, first: usize) -> Tensor<3, K> {
    let [_, len, _] = tensor.dims();
    match first {
        // Burn cannot narrow to an empty axis.
        0 => tensor,
        _ => tensor.narrow(1, first, len - first),
    }
}

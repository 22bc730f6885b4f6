//! Masks of either polarity.

use burn::tensor::{Bool, Device, Tensor};

/// A mask `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]` that says what its `true` means.
///
/// Burn's own `attention` hides where its mask is `true`, other libraries show there; here the constructor
/// names it.
#[derive(Clone, Debug)]
pub struct AttentionMask {
    tensor: Tensor<4, Bool>,
    hidden: bool,
}

impl AttentionMask {
    /// A query sees a key where the tensor is `true`.
    #[must_use]
    pub fn visible(tensor: Tensor<4, Bool>) -> Self {
        Self {
            tensor,
            hidden: false,
        }
    }

    /// A query does not see a key where the tensor is `true`.
    #[must_use]
    pub fn hidden(tensor: Tensor<4, Bool>) -> Self {
        Self {
            tensor,
            hidden: true,
        }
    }

    /// Where a query sees a key.
    #[must_use]
    pub fn into_visible(self) -> Tensor<4, Bool> {
        if self.hidden {
            self.tensor.bool_not()
        } else {
            self.tensor
        }
    }

    /// Shape of the tensor.
    #[must_use]
    pub fn dims(&self) -> [usize; 4] {
        self.tensor.dims()
    }

    pub(crate) fn device(&self) -> Device {
        self.tensor.device()
    }

    /// The tensor, and whether its `true` hides.
    pub(super) fn into_parts(self) -> (Tensor<4, Bool>, bool) {
        (self.tensor, self.hidden)
    }
}

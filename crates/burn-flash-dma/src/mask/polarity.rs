//! Masks of either polarity.

use crate::fallback::tensors::unless_empty;
use burn::tensor::{Bool, Device, Tensor, kind::Basic};

/// A mask `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]` that states the meaning of `true`.
///
/// `true` hides in Burn's own `attention` and shows in other libraries; here the constructor says which.
#[derive(Clone, Debug)]
pub struct AttentionMask {
    tensor: Tensor<4, Bool>,
    hidden: bool,
}

impl AttentionMask {
    /// A mask that shows a key to a query where the tensor is `true`.
    #[must_use]
    pub fn visible(tensor: Tensor<4, Bool>) -> Self {
        Self {
            tensor,
            hidden: false,
        }
    }

    /// A mask that hides a key from a query where the tensor is `true`.
    #[must_use]
    pub fn hidden(tensor: Tensor<4, Bool>) -> Self {
        Self {
            tensor,
            hidden: true,
        }
    }

    /// The mask as a tensor that is `true` where a query sees a key.
    #[must_use]
    pub fn into_visible(self) -> Tensor<4, Bool> {
        if self.hidden {
            self.tensor.bool_not()
        } else {
            self.tensor
        }
    }

    /// Shape of the mask.
    #[must_use]
    pub fn dims(&self) -> [usize; 4] {
        self.tensor.dims()
    }

    /// The rows `queries` of [`into_visible`](Self::into_visible), at least one, or its single row for all.
    pub(crate) fn into_visible_rows(self, queries: &[usize]) -> Tensor<4, Bool> {
        let tensor = match self.tensor.dims()[2] {
            1 => self.tensor,
            // Flex gives the result of a `select` of bools another type, see `docs/upstream.md`.
            _ => {
                let row = |&query| self.tensor.clone().narrow(2, query, 1);
                Tensor::cat(queries.iter().map(row).collect(), 2)
            }
        };
        Self { tensor, ..self }.into_visible()
    }

    pub(crate) fn device(&self) -> Device {
        self.tensor.device()
    }

    /// The tensor, and true if its `true` hides.
    pub(super) fn into_parts(self) -> (Tensor<4, Bool>, bool) {
        (self.tensor, self.hidden)
    }
}

/// The shape that two shapes broadcast to.
///
/// # Panics
///
/// If there is no such shape; `what` names the tensors in the message.
pub(super) fn broadcast_shape<const D: usize>(
    a: [usize; D],
    b: [usize; D],
    what: &str,
) -> [usize; D] {
    std::array::from_fn(|axis| match (a[axis], b[axis]) {
        (1, n) | (n, 1) => n,
        (n, m) => {
            assert_eq!(
                n, m,
                "{what} of shapes {a:?} and {b:?} do not broadcast on axis {axis}"
            );
            n
        }
    })
}

pub(super) fn expand<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    shape: [usize; D],
) -> Tensor<D, K> {
    unless_empty(tensor, shape, |tensor| tensor.expand(shape))
}

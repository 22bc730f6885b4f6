//! What the masked passes read and write.

use crate::View;

/// A borrowed tensor that broadcasts: element `index` is `data[sum(index * strides)]`, with any stride on any
/// axis, 0 included.
#[derive(Clone, Copy, Debug)]
pub struct BroadcastView<'a, T> {
    /// The buffer; the element of index zero comes first.
    pub data: &'a [T],
    /// Size of each axis.
    pub shape: [usize; 4],
    /// Elements from one index to the next, for each axis.
    pub strides: [usize; 4],
}

impl<'a, T> BroadcastView<'a, T> {
    /// A view of a contiguous buffer.
    pub fn contiguous(data: &'a [T], shape: [usize; 4]) -> Self {
        let View { strides, .. } = View::contiguous(data, shape);
        Self {
            data,
            shape,
            strides,
        }
    }

    /// The stride of an axis; 0 if it broadcasts.
    pub(crate) fn step(&self, axis: usize) -> usize {
        if self.shape[axis] == 1 {
            0
        } else {
            self.strides[axis]
        }
    }
}

/// The inputs of attention under a mask and a bias, shaped as the problem says.
#[derive(Clone, Copy, Debug)]
pub struct MaskedInputs<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: View<'a, E, 4>,
    /// The bits of the mask's tile plan, contiguous; given exactly if the problem has a plan.
    pub bits: Option<&'a [u32]>,
    /// Added to the logits after the softcap; given exactly if the problem has a bias.
    pub bias: Option<BroadcastView<'a, f32>>,
}

/// Where the masked backward pass writes; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct MaskedGradients<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: &'a mut [E],
    /// In the bias's own shape, if there is a bias; `None` does not compute it.
    pub bias: Option<&'a mut [f32]>,
}

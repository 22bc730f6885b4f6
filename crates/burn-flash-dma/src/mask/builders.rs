//! Masks from lengths, windows, documents and biases.

use super::polarity::{AttentionMask, broadcast_shape, expand};
use crate::fallback::running::{arange, running_sum};
use burn::tensor::{Bool, Device, Int, Tensor};

/// How [`AttentionMask::in_key_blocks`] shows or hides a block of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockRule {
    /// Shows the block if the query sees any of its keys. Never hides a visible key.
    Any,
    /// Shows the block if the query sees more than half of its keys. May hide visible keys.
    Majority,
}

impl AttentionMask {
    /// Bottom-right aligned causal masking, `[1, 1, q_len, k_len]`, to combine with other masks (attention has an
    /// option for it): query `i` sees the keys `j <= i + k_len - q_len`.
    #[must_use]
    pub fn causal(lengths: [usize; 2], device: &Device) -> Self {
        Self::visible(distance(lengths, device).greater_equal_elem(0))
    }

    /// A sliding window, `[1, 1, q_len, k_len]`: query `i` sees the `window` keys up to `i + k_len - q_len`.
    #[must_use]
    pub fn sliding_window(lengths: [usize; 2], window: usize, device: &Device) -> Self {
        let distance = distance(lengths, device);
        let near = distance.clone().lower_elem(i32_of(window));
        Self::visible(distance.greater_equal_elem(0).bool_and(near))
    }

    /// Padding after sequences of the given `lengths` `[batch]`: `[batch, 1, 1, k_len]`. Sequence `b` shows the keys
    /// `j < lengths[b]`.
    #[must_use]
    pub fn padding(lengths: Tensor<1, Int>, k_len: usize) -> Self {
        let (batch, device) = (lengths.dims()[0], lengths.device());
        let shape = [batch, 1, 1, k_len];
        if shape.contains(&0) {
            return Self::visible(Tensor::empty(shape, &device));
        }
        let options = (&device, lengths.dtype());
        let keys = arange(0..k_len as i64, options);
        let keys = keys.reshape([1, 1, 1, k_len]).expand(shape);
        Self::visible(keys.lower(lengths.reshape([batch, 1, 1, 1]).expand(shape)))
    }

    /// Packed sequences, `[batch, 1, len, len]`: `documents` `[batch, len]` holds the document of each token, and a
    /// token sees the tokens of its own document.
    #[must_use]
    pub fn documents(documents: Tensor<2, Int>) -> Self {
        let [batch, len] = documents.dims();
        let shape = [batch, 1, len, len];
        if shape.contains(&0) {
            return Self::visible(Tensor::empty(shape, &documents.device()));
        }
        let queries = documents.clone().reshape([batch, 1, len, 1]).expand(shape);
        let keys = documents.reshape([batch, 1, 1, len]).expand(shape);
        Self::visible(queries.equal(keys))
    }

    /// Shows the pairs whose bias is greater than `threshold`, in the shape of the bias. A NaN bias hides its pair.
    #[must_use]
    pub fn above(bias: Tensor<4>, threshold: f32) -> Self {
        Self::visible(bias.greater_elem(threshold))
    }

    /// Exactly the `window` keys of greatest bias of each query: `[batch, heads, q_len, k_len]` for a bias `[batch,
    /// heads, q_len | 1, k_len]`. A tie goes to the lower index; a bias of −∞ or NaN is never kept.
    ///
    /// With `among`, only the keys it shows are candidates, so a query may keep fewer than `window`.
    ///
    /// # Panics
    ///
    /// If `window` is 0, or `among` does not broadcast to the result.
    #[must_use]
    pub fn top(bias: Tensor<4>, window: usize, q_len: usize, among: Option<AttentionMask>) -> Self {
        assert!(window > 0, "the window must be at least 1");
        let [batch, heads, _, k_len] = bias.dims();
        let shape = [batch, heads, q_len, k_len];
        if shape.contains(&0) {
            return Self::visible(Tensor::empty(shape, &bias.device()));
        }
        let none = f32::NEG_INFINITY;
        let mut bias = bias.expand(shape);
        bias = bias.clone().mask_fill(bias.is_nan(), none);
        if let Some(among) = among {
            bias = bias.mask_fill(among.into_visible().expand(shape).bool_not(), none);
        }
        let seen = bias.clone().not_equal_elem(none);
        if window >= k_len {
            return Self::visible(seen);
        }
        // The lowest bias that is kept; among the keys equal to it, the first ones that there is room for.
        let sorted = bias.clone().sort_descending(3);
        let last = sorted.narrow(3, window - 1, 1).expand(shape);
        let greater = bias.clone().greater(last.clone());
        let kept = greater.clone().int().sum_dim(3);
        let room = kept.neg().add_scalar(i32_of(window));
        let equal = bias.equal(last);
        let rows = equal.clone().int().reshape([batch * heads * q_len, k_len]);
        let before: Tensor<4, Int> = running_sum(rows).reshape(shape);
        let kept = before.lower_equal(room.expand(shape)).bool_and(equal);
        Self::visible(greater.bool_or(kept).bool_and(seen))
    }

    /// Shows or hides aligned blocks of `block` keys as a whole: fewer blocks are partial, so more are skipped.
    /// Blocks of 64, as in a [`TilePlan`](crate::TilePlan), leave none partial.
    ///
    /// # Panics
    ///
    /// If `block` is 0.
    #[must_use]
    pub fn in_key_blocks(self, block: usize, rule: BlockRule) -> Self {
        assert!(block > 0, "a block has at least one key");
        let visible = self.into_visible();
        let [batch, heads, q_len, k_len] = visible.dims();
        if batch * heads * q_len * k_len == 0 {
            return Self::visible(visible);
        }
        let block = block.min(k_len);
        let (blocks, rows) = (k_len.div_ceil(block), batch * heads * q_len);
        let mut ones: Tensor<2, Int> = visible.int().reshape([rows, k_len]);
        let rest = blocks * block - k_len;
        if rest > 0 {
            let zeros = Tensor::zeros([rows, rest], (&ones.device(), ones.dtype()));
            ones = Tensor::cat(vec![ones, zeros], 1);
        }
        let counts = ones.reshape([rows, blocks, block]).sum_dim(2);
        let shown = match rule {
            BlockRule::Any => counts.greater_elem(0),
            // The last block may be shorter; half counts the keys it has.
            BlockRule::Majority => {
                let mut sizes = vec![i32_of(block); blocks];
                sizes[blocks - 1] = i32_of(block - rest);
                let sizes = Tensor::<1, Int>::from_data(&sizes[..], &counts.device());
                let sizes = sizes.cast(counts.dtype()).reshape([1, blocks, 1]);
                let sizes = sizes.expand([rows, blocks, 1]);
                counts.mul_scalar(2).greater(sizes)
            }
        };
        let shown = shown.expand([rows, blocks, block]);
        let shown: Tensor<2, Bool> = shown.reshape([rows, blocks * block]);
        let shown = shown.narrow(1, 0, k_len);
        Self::visible(shown.reshape([batch, heads, q_len, k_len]))
    }

    /// Pairs that both masks show; axes of size 1 broadcast.
    ///
    /// # Panics
    ///
    /// If the shapes do not broadcast to one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let [a, b] = Self::broadcast(self, other);
        Self::visible(a.bool_and(b))
    }

    /// Pairs that at least one mask shows; axes of size 1 broadcast.
    ///
    /// # Panics
    ///
    /// If the shapes do not broadcast to one.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let [a, b] = Self::broadcast(self, other);
        Self::visible(a.bool_or(b))
    }

    fn broadcast(a: Self, b: Self) -> [Tensor<4, Bool>; 2] {
        let shape = broadcast_shape(a.dims(), b.dims(), "masks");
        [a, b].map(|mask| expand(mask.into_visible(), shape))
    }
}

/// Distance of each key from the last one its query sees, `[1, 1, q_len, k_len]`: negative for later keys.
fn distance([q_len, k_len]: [usize; 2], device: &Device) -> Tensor<4, Int> {
    let shape = [1, 1, q_len, k_len];
    if shape.contains(&0) {
        return Tensor::zeros(shape, device);
    }
    let range = |len: usize| arange(0..len as i64, device);
    let positions = range(q_len).add_scalar(k_len as i32 - q_len as i32);
    let positions = positions.reshape([1, 1, q_len, 1]).expand(shape);
    positions - range(k_len).reshape([1, 1, 1, k_len]).expand(shape)
}

fn i32_of(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

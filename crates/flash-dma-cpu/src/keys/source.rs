//! Where a pass reads its keys.

use crate::{Element, Inputs};
use flash_dma_problem::Interval;

/// The keys of a problem, wherever they lie: `head` is a sequence and a key/value head, `key` an index
/// below the problem's `k_len`.
pub(crate) trait KeySource<E>: Sync {
    /// The row of k.
    fn key(&self, head: [usize; 2], key: usize) -> &[E];

    /// The row of v.
    fn value(&self, head: [usize; 2], key: usize) -> &[E];

    /// What is added to the key's logits: 0 without scores.
    fn score(&self, head: [usize; 2], key: usize) -> f32;

    /// The intervals of all keys of the head. `None`: attended from the key's own position on.
    fn intervals(&self, head: [usize; 2]) -> Option<&[Interval]>;
}

impl<E: Element> KeySource<E> for Inputs<'_, E> {
    #[inline]
    fn key(&self, [batch, head]: [usize; 2], key: usize) -> &[E] {
        self.k.row(batch, head, key)
    }

    #[inline]
    fn value(&self, [batch, head]: [usize; 2], key: usize) -> &[E] {
        self.v.row(batch, head, key)
    }

    #[inline]
    fn score(&self, [batch, head]: [usize; 2], key: usize) -> f32 {
        (self.selection).map_or(0.0, |s| s.scores.row(batch, head)[key])
    }

    fn intervals(&self, [batch, head]: [usize; 2]) -> Option<&[Interval]> {
        let [_, heads, len] = self.selection?.scores.shape;
        let row = (batch * heads + head) * len;
        Some(&self.selection?.intervals[row..row + len])
    }
}

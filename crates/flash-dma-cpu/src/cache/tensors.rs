//! The tensors of the calls.

use crate::view::View;

/// The tensors of a cache: contiguous, in the shapes of its [`Storage`](flash_dma_problem::Storage).
#[derive(Debug)]
pub enum Cache<'a, E> {
    /// The keys of each head that its rule keeps.
    Slots(Slots<'a, E>),
    /// Every key.
    Pages(Pages<'a, E>),
}

/// [`Cache`], read-only.
#[derive(Clone, Copy, Debug)]
pub enum CacheRef<'a, E> {
    /// The keys of each head that its rule keeps.
    Slots(SlotsRef<'a, E>),
    /// Every key.
    Pages(PagesRef<'a, E>),
}

/// The tensors of [`Storage::Slots`](flash_dma_problem::Storage::Slots).
#[derive(Debug)]
pub struct Slots<'a, E> {
    /// `[batch, kv_heads, window, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, window, head_dim]`.
    pub v: &'a mut [E],
    /// `[batch, kv_heads, window]`; −∞ in an empty slot, and in that of a hidden key which is or was recent.
    pub score: &'a mut [f32],
    /// `[batch, kv_heads, window]`: the key's index in its sequence; −1 in an empty slot.
    pub position: &'a mut [i32],
    /// `[batch]`: the tokens each sequence has been given.
    pub seen: &'a mut [i32],
}

/// [`Slots`], read-only.
#[derive(Clone, Copy, Debug)]
pub struct SlotsRef<'a, E> {
    /// Like [`Slots::k`].
    pub k: &'a [E],
    /// Like [`Slots::v`].
    pub v: &'a [E],
    /// Like [`Slots::score`].
    pub score: &'a [f32],
    /// Like [`Slots::position`].
    pub position: &'a [i32],
    /// Like [`Slots::seen`].
    pub seen: &'a [i32],
}

/// The outputs of [`chunk_keys`](super::chunk_keys), all contiguous.
#[derive(Debug)]
pub struct ChunkKeys<'a, E> {
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, window + tokens, head_dim]`.
    pub v: &'a mut [E],
    /// `[batch, kv_heads, window + tokens]`: the scores that are added to the logits.
    pub scores: &'a mut [f32],
    /// `[batch, kv_heads, window + tokens]`: the numbers that rank the keys, +∞ for visible sinks. Given exactly if the
    /// cache's rule has sinks; otherwise the scores rank.
    pub rank: Option<&'a mut [f32]>,
}

/// The tensors of [`Storage::Pages`](flash_dma_problem::Storage::Pages).
#[derive(Debug)]
pub struct Pages<'a, E> {
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub k: &'a mut [E],
    /// `[pages, kv_heads, page_len, head_dim]`.
    pub v: &'a mut [E],
    /// `[pages, kv_heads, page_len]`, given exactly if the cache has scores; −∞ hides a key.
    pub scores: Option<&'a mut [f32]>,
    /// `[batch, max_pages]`: the pages of each sequence in order.
    pub table: &'a [i32],
    /// `[batch]`: the tokens each sequence holds.
    pub lengths: &'a mut [i32],
}

/// [`Pages`], read-only.
#[derive(Clone, Copy, Debug)]
pub struct PagesRef<'a, E> {
    /// Like [`Pages::k`].
    pub k: &'a [E],
    /// Like [`Pages::v`].
    pub v: &'a [E],
    /// Like [`Pages::scores`].
    pub scores: Option<&'a [f32]>,
    /// Like [`Pages::table`].
    pub table: &'a [i32],
    /// Like [`Pages::lengths`].
    pub lengths: &'a [i32],
}

impl<E> Cache<'_, E> {
    /// A read-only view of the tensors.
    #[must_use]
    pub fn read(&self) -> CacheRef<'_, E> {
        match self {
            Self::Slots(slots) => CacheRef::Slots(slots.read()),
            Self::Pages(pages) => CacheRef::Pages(pages.read()),
        }
    }
}

impl<E> Slots<'_, E> {
    /// A read-only view of the tensors.
    #[must_use]
    pub fn read(&self) -> SlotsRef<'_, E> {
        SlotsRef {
            k: self.k,
            v: self.v,
            score: self.score,
            position: self.position,
            seen: self.seen,
        }
    }
}

impl<E> Pages<'_, E> {
    /// A read-only view of the tensors.
    #[must_use]
    pub fn read(&self) -> PagesRef<'_, E> {
        PagesRef {
            k: self.k,
            v: self.v,
            scores: self.scores.as_deref(),
            table: self.table,
            lengths: self.lengths,
        }
    }
}

/// New tokens of every sequence.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a, E> {
    /// `[batch, kv_heads, tokens, head_dim]`.
    pub k: View<'a, E, 4>,
    /// `[batch, kv_heads, tokens, head_dim]`.
    pub v: View<'a, E, 4>,
    /// `[batch, kv_heads, tokens]`, given exactly if the cache has scores, as slots always do.
    pub scores: Option<View<'a, f32, 3>>,
}

impl<'a, E> Tokens<'a, E> {
    #[inline]
    pub(crate) fn rows(&self, batch: usize, head: usize, token: usize) -> [&'a [E]; 2] {
        [&self.k, &self.v].map(|rows| rows.row(batch, head, token))
    }
}

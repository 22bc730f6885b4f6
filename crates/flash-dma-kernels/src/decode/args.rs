//! The tensors of a cache and of the tokens appended to it.

use crate::host::check::{Layout, check_tensor};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AppendProblem, AttentionError, CacheShape, Storage, TensorName};

/// A cache of slots; all tensors contiguous, updated in place.
///
/// A new cache is all empty slots: scores −∞, positions −1, nothing seen; the contents of `k` and `v` do not matter.
#[derive(Clone, Debug)]
pub struct Slots {
    /// `[batch, kv_heads, window, head_dim]`, the cache's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, window, head_dim]`, the cache's element type.
    pub v: TensorBinding,
    /// `[batch, kv_heads, window]`, f32; −∞ in empty slots, and in those of hidden keys that are or were recent.
    pub score: TensorBinding,
    /// `[batch, kv_heads, window]`, i32: the key's index in its sequence; −1 in empty slots.
    pub position: TensorBinding,
    /// `[batch]`, i32: tokens that each sequence has been given.
    pub seen: TensorBinding,
}

/// A cache of pages; all tensors contiguous. `k`, `v`, `scores` and `lengths` are updated in place.
#[derive(Clone, Debug)]
pub struct Pages {
    /// `[pages, kv_heads, page_len, head_dim]`, the cache's element type.
    pub k: TensorBinding,
    /// `[pages, kv_heads, page_len, head_dim]`, the cache's element type.
    pub v: TensorBinding,
    /// `[pages, kv_heads, page_len]`, f32; given exactly if the cache's keys carry scores.
    pub scores: Option<TensorBinding>,
    /// `[batch, max_pages]`, i32: the pages of each sequence in order, including the pages for the new tokens. The
    /// entries after them are never read. A page may belong to several sequences if no new token is written to it.
    pub table: TensorBinding,
    /// `[batch]`, i32: tokens that each sequence holds.
    pub lengths: TensorBinding,
}

/// A cache of either kind.
#[derive(Clone, Debug)]
pub enum Cache {
    /// The keys of each kv head that its rule keeps.
    Slots(Slots),
    /// All keys.
    Pages(Pages),
}

/// New tokens, of any strides with a contiguous last axis.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[batch, kv_heads, tokens, head_dim]`, the cache's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, tokens, head_dim]`, the cache's element type.
    pub v: TensorBinding,
    /// `[batch, kv_heads, tokens]`, f32; given exactly if the cache's keys carry scores.
    pub scores: Option<TensorBinding>,
}

/// The inputs of a decode step, apart from the cache.
#[derive(Clone, Debug)]
pub struct StepInputs {
    /// `[batch, q_heads, tokens, head_dim]`, the cache's element type, of any strides with a contiguous last axis.
    pub q: TensorBinding,
    /// The tokens of the queries.
    pub tokens: Tokens,
}

/// The outputs of a decode step.
#[derive(Clone, Debug)]
pub struct StepOutputs {
    /// The cache, read and updated in place.
    pub cache: Cache,
    /// Contiguous `[batch, q_heads, tokens, head_dim]`, the cache's element type; overwritten.
    pub out: TensorBinding,
    /// Contiguous `[batch, q_heads, tokens]`, f32, natural logarithm; overwritten.
    pub lse: TensorBinding,
}

/// The keys of a chunk, written by [`chunk_keys`](crate::chunk_keys): all contiguous and overwritten.
#[derive(Clone, Debug)]
pub struct ChunkOutputs {
    /// `[batch, kv_heads, window + tokens, head_dim]`, the cache's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, window + tokens, head_dim]`, the cache's element type.
    pub v: TensorBinding,
    /// `[batch, kv_heads, window + tokens]`, f32: the scores that are added to the logits.
    pub scores: TensorBinding,
    /// `[batch, kv_heads, window + tokens]`, f32: the keys' ranks, +∞ for a visible sink. Given exactly if the rule has
    /// sinks.
    pub rank: Option<TensorBinding>,
}

impl ChunkOutputs {
    pub(crate) fn check(&self, problem: &AppendProblem) -> Result<(), AttentionError> {
        let cache = &problem.cache;
        let (len, size) = (cache.capacity() + problem.tokens, cache.element.size());
        let shape = [cache.batch, cache.kv_heads, len, cache.head_dim];
        let whole = Layout::Contiguous;
        check_tensor(TensorName::Key, &self.k, &shape, size, whole)?;
        check_tensor(TensorName::Value, &self.v, &shape, size, whole)?;
        check_tensor(TensorName::Scores, &self.scores, &shape[..3], 4, whole)?;
        match (&self.rank, cache.has_sinks()) {
            (Some(rank), true) => check_tensor(TensorName::Rank, rank, &shape[..3], 4, whole),
            (None, false) => Ok(()),
            (Some(_), false) => Err(unsupported("a rank of keys without sinks")),
            (None, true) => Err(unsupported("sinks without a rank of the keys")),
        }
    }
}

impl Cache {
    pub(crate) fn check(&self, cache: &CacheShape) -> Result<(), AttentionError> {
        match self {
            Self::Slots(slots) => slots.check(cache),
            Self::Pages(pages) => pages.check(cache),
        }
    }
}

impl Slots {
    pub(crate) fn check(&self, cache: &CacheShape) -> Result<(), AttentionError> {
        let Storage::Slots { .. } = cache.storage else {
            return Err(unsupported("slots where the problem has pages"));
        };
        let (size, kv) = (cache.element.size(), cache.kv_shape());
        let whole = Layout::Contiguous;
        check_tensor(TensorName::CachedKey, &self.k, &kv, size, whole)?;
        check_tensor(TensorName::CachedValue, &self.v, &kv, size, whole)?;
        check_tensor(TensorName::CachedScores, &self.score, &kv[..3], 4, whole)?;
        let positions = TensorName::CachedPositions;
        check_tensor(positions, &self.position, &kv[..3], 4, whole)?;
        check_tensor(TensorName::Seen, &self.seen, &[cache.batch], 4, whole)
    }
}

impl Pages {
    pub(crate) fn check(&self, cache: &CacheShape) -> Result<(), AttentionError> {
        let Storage::Pages { max_pages, .. } = cache.storage else {
            return Err(unsupported("pages where the problem has slots"));
        };
        let (size, kv) = (cache.element.size(), cache.kv_shape());
        let whole = Layout::Contiguous;
        check_tensor(TensorName::CachedKey, &self.k, &kv, size, whole)?;
        check_tensor(TensorName::CachedValue, &self.v, &kv, size, whole)?;
        let scores = self.scores.as_ref();
        check_scores(TensorName::CachedScores, scores, cache, &kv[..3], whole)?;
        let table = [cache.batch, max_pages];
        check_tensor(TensorName::PageTable, &self.table, &table, 4, whole)?;
        check_tensor(TensorName::Lengths, &self.lengths, &[cache.batch], 4, whole)
    }
}

impl Tokens {
    /// No tokens, in the same buffers.
    pub(crate) fn none(mut self) -> Self {
        self.k.shape[2] = 0;
        self.v.shape[2] = 0;
        if let Some(scores) = &mut self.scores {
            scores.shape[2] = 0;
        }
        self
    }

    pub(crate) fn check(&self, problem: &AppendProblem) -> Result<(), AttentionError> {
        let (size, kv) = (problem.cache.element.size(), problem.kv_shape());
        let strided = Layout::Strided;
        check_tensor(TensorName::Key, &self.k, &kv, size, strided)?;
        check_tensor(TensorName::Value, &self.v, &kv, size, strided)?;
        let (scores, cache) = (self.scores.as_ref(), &problem.cache);
        check_scores(TensorName::Scores, scores, cache, &kv[..3], strided)
    }
}

/// Checks scores, which are given exactly if the cache's keys carry some.
fn check_scores(
    name: TensorName,
    scores: Option<&TensorBinding>,
    cache: &CacheShape,
    shape: &[usize],
    layout: Layout,
) -> Result<(), AttentionError> {
    match (scores, cache.has_scores()) {
        (Some(scores), true) => check_tensor(name, scores, shape, 4, layout),
        (None, false) => Ok(()),
        _ => Err(AttentionError::CacheScores),
    }
}

fn unsupported(what: &str) -> AttentionError {
    AttentionError::Unsupported { what: what.into() }
}

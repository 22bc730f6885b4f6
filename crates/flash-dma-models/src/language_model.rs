//! The interface of a model for generation.

use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;

/// A causal language model whose only memory of earlier tokens is its caches.
///
/// Implement it for your own model to use [`generate`](crate::generate) with it.
pub trait LanguageModel {
    /// Number of tokens in the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Maximum length of a sequence, if limited.
    fn max_len(&self) -> Option<usize> {
        None
    }

    /// The device of the parameters.
    fn device(&self) -> Device;

    /// An empty cache per attention layer, for this many sequences.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttention::try_init_cache`](burn_flash_dma::nn::DynamicMaskAttention::try_init_cache).
    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError>;

    /// Length up to which [`try_read`](Self::try_read) of one token per sequence launches the same work at every
    /// position, over caches that [can replay](AttentionCache::can_replay): [`Generator`](crate::generate::Generator)
    /// then records the step in a device graph and replays it. By default no step is recorded. The computation must
    /// not depend on anything that a step reads on the host, including the host's
    /// [`lengths`](AttentionCache::lengths).
    fn replays_up_to(&self) -> usize {
        0
    }

    /// Reads tokens `[sequences, len]` that continue those in the caches, and returns the logits after each of the
    /// last `rows` of them: `[sequences, rows, vocabulary]`, f32.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttention::try_forward_cached`](burn_flash_dma::nn::DynamicMaskAttention::try_forward_cached).
    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError>;
}

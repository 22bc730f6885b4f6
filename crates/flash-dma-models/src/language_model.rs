//! What generation asks of a model.

use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;

/// A causal language model that remembers the tokens before in caches, and in nothing else.
///
/// Implement it for a model of your own to use [`generate`](crate::generate) with it.
pub trait LanguageModel {
    /// Number of tokens in the vocabulary.
    fn vocabulary(&self) -> usize;

    /// The longest sequence that the model can read, if there is one.
    fn max_len(&self) -> Option<usize> {
        None
    }

    /// The device of the parameters.
    fn device(&self) -> Device;

    /// An empty cache per attention layer, for so many sequences.
    ///
    /// # Errors
    ///
    /// Those of [`DynamicMaskAttention::try_init_cache`](burn_flash_dma::nn::DynamicMaskAttention::try_init_cache).
    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError>;

    /// The longest sequence up to which [`try_read`](Self::try_read) of one token per sequence launches the same work at
    /// every position, over caches that [can replay](AttentionCache::can_replay): then
    /// [`Generator`](crate::generate::Generator) records the step in a graph of the device and replays it. No step is
    /// recorded by default. What a step reads on the host, and the host's
    /// [`lengths`](AttentionCache::lengths), must not decide what it computes.
    fn replays_up_to(&self) -> usize {
        0
    }

    /// Reads tokens `[sequences, len]` that go on where those that the caches have been given end, and returns the
    /// logits of what follows each of the last `rows` of them: `[sequences, rows, vocabulary]`, f32.
    ///
    /// # Errors
    ///
    /// Those of [`DynamicMaskAttention::try_forward_cached`](burn_flash_dma::nn::DynamicMaskAttention::try_forward_cached).
    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError>;
}

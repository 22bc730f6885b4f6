//! A model that writes after its prompts.

use super::Options;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use flash_dma_models::LanguageModel;
use flash_dma_models::nn::Decoder;
use flash_dma_reference::Rng;

/// Vocabulary of the model: bytes.
pub const VOCABULARY: usize = 256;

/// Random bytes, one sequence each for a batch.
pub struct Prompt {
    /// `[batch, prompt]`.
    tokens: Tensor<2, Int>,
    /// Tokens on the host.
    pub rows: Vec<Vec<u32>>,
    chunk: usize,
}

impl Prompt {
    /// The prompt of the options.
    pub fn new(options: &Options, device: &Device) -> Self {
        let mut rng = Rng::new(7);
        let count = options.model.batch * options.prompt;
        let bytes: Vec<i32> = (0..count).map(|_| (rng.next_u64() >> 56) as i32).collect();
        let row = |row: &[i32]| row.iter().map(|&byte| byte as u32).collect();
        let rows = bytes.chunks(options.prompt).map(row).collect();
        let data = TensorData::new(bytes, [options.model.batch, options.prompt]);
        Self {
            rows,
            tokens: Tensor::from_data(data, device),
            chunk: options.chunk,
        }
    }
}

/// A model, its caches, and the token that it reads next. Clones share the tensors of their caches until one is
/// written. Errors are those of [`flash_dma_models::LanguageModel::try_read`].
#[derive(Clone)]
pub struct Session {
    model: Decoder,
    caches: Vec<AttentionCache>,
    /// `[batch, 1]`.
    next: Option<Tensor<2, Int>>,
}

impl Session {
    /// Empty caches; an error if the model's attention cannot be cached.
    pub fn new(model: &Decoder, batch: usize) -> Result<Self, AttentionError> {
        Ok(Self {
            model: model.clone(),
            caches: model.try_init_caches(batch)?,
            next: None,
        })
    }

    /// Reads prompts chunk by chunk.
    pub fn read(&mut self, prompt: &Prompt) -> Result<(), AttentionError> {
        let [_, len] = prompt.tokens.dims();
        for start in (0..len).step_by(prompt.chunk) {
            let count = prompt.chunk.min(len - start);
            let chunk = prompt.tokens.clone().narrow(1, start, count);
            let logits = self.model.try_read(chunk, 1, &mut self.caches)?;
            self.next = Some(logits.flatten::<2>(0, 1).argmax(1));
        }
        Ok(())
    }

    /// Logits after the next token, `[batch, 256]`.
    pub fn logits(&mut self) -> Result<Tensor<2>, AttentionError> {
        let next = self.next.clone().expect("a prompt has been read");
        let logits = self.model.try_read(next, 1, &mut self.caches)?;
        Ok(logits.flatten(0, 1))
    }

    /// Reads the next token, and returns the one that follows it.
    pub fn step(&mut self) -> Result<Tensor<2, Int>, AttentionError> {
        let next = self.logits()?.argmax(1);
        self.next = Some(next.clone());
        Ok(next)
    }

    /// `count` [steps](Self::step), and the tokens written.
    pub fn steps(&mut self, count: usize) -> Result<Vec<Tensor<2, Int>>, AttentionError> {
        (0..count).map(|_| self.step()).collect()
    }

    /// Reads these tokens next, one per sequence.
    pub fn write(&mut self, tokens: &[i32], device: &Device) {
        let data = TensorData::new(tokens.to_vec(), [tokens.len(), 1]);
        self.next = Some(Tensor::from_data(data, device));
    }

    /// Bytes of all caches.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(AttentionCache::bytes).sum()
    }
}

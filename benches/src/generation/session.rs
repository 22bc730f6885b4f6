//! A model that writes behind its prompts.

use super::Options;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use flash_dma_models::Decoder;
use train_text::model::{TextModel, VOCABULARY};
use train_text::rng::Rng;

/// Random bytes, one sequence each for a batch.
pub struct Prompt {
    /// `[batch, prompt]`.
    tokens: Tensor<2, Int>,
    /// The same on the host.
    pub rows: Vec<Vec<u32>>,
    chunk: usize,
}

impl Prompt {
    /// The prompt of the options.
    pub fn new(options: &Options, device: &Device) -> Self {
        let mut rng = Rng::new(0, 0);
        let count = options.model.batch * options.prompt;
        let bytes: Vec<i32> = (0..count).map(|_| rng.below(VOCABULARY) as i32).collect();
        let rows = bytes.chunks(options.prompt);
        let rows = rows.map(|row| row.iter().map(|&byte| byte as u32).collect());
        let rows = rows.collect();
        let data = TensorData::new(bytes, [options.model.batch, options.prompt]);
        Self {
            rows,
            tokens: Tensor::from_data(data, device),
            chunk: options.chunk,
        }
    }
}

/// The model as a [`Generator`](flash_dma_models::generate::Generator) sees it.
pub struct Writer<'a> {
    /// The model.
    pub model: &'a TextModel,
    /// Where its parameters are.
    pub device: &'a Device,
    /// Positions of its rotary tables.
    pub context: usize,
}

impl Decoder for Writer<'_> {
    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        self.model.caches(sequences)
    }

    fn replays_up_to(&self) -> usize {
        self.context
    }

    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError> {
        assert_eq!(rows, 1, "rows of logits");
        let [batch, _] = tokens.dims();
        let logits = self.model.forward_cached(tokens, caches)?;
        Ok(logits.reshape([batch, 1, VOCABULARY]))
    }
}

/// A model, its caches, and the token that it reads next. A clone shares the tensors of its caches until one of both
/// writes.
#[derive(Clone)]
pub struct Session {
    model: TextModel,
    caches: Vec<AttentionCache>,
    /// `[batch, 1]`.
    next: Option<Tensor<2, Int>>,
}

impl Session {
    /// Empty caches.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the model's attention cannot be cached.
    pub fn new(model: &TextModel, batch: usize) -> Result<Self, AttentionError> {
        Ok(Self {
            model: model.clone(),
            caches: model.caches(batch)?,
            next: None,
        })
    }

    /// Reads prompts chunk by chunk.
    ///
    /// # Errors
    ///
    /// Those of [`TextModel::forward_cached`].
    pub fn read(&mut self, prompt: &Prompt) -> Result<(), AttentionError> {
        let [_, len] = prompt.tokens.dims();
        for start in (0..len).step_by(prompt.chunk) {
            let count = prompt.chunk.min(len - start);
            let chunk = prompt.tokens.clone().narrow(1, start, count);
            let logits = self.model.forward_cached(chunk, &mut self.caches)?;
            self.next = Some(most_likely(logits));
        }
        Ok(())
    }

    /// The logits behind the token that is read next, `[batch, 256]`.
    ///
    /// # Errors
    ///
    /// Those of [`TextModel::forward_cached`].
    pub fn logits(&mut self) -> Result<Tensor<2>, AttentionError> {
        let next = self.next.clone().expect("a prompt has been read");
        self.model.forward_cached(next, &mut self.caches)
    }

    /// Reads the next token, and returns the one that follows it.
    ///
    /// # Errors
    ///
    /// Those of [`TextModel::forward_cached`].
    pub fn step(&mut self) -> Result<Tensor<2, Int>, AttentionError> {
        let next = most_likely(self.logits()?);
        self.next = Some(next.clone());
        Ok(next)
    }

    /// `count` [steps](Self::step), and what they wrote.
    ///
    /// # Errors
    ///
    /// Those of [`step`](Self::step).
    pub fn steps(&mut self, count: usize) -> Result<Vec<Tensor<2, Int>>, AttentionError> {
        (0..count).map(|_| self.step()).collect()
    }

    /// Reads these tokens next, one per sequence.
    pub fn write(&mut self, tokens: &[i32], device: &Device) {
        let data = TensorData::new(tokens.to_vec(), [tokens.len(), 1]);
        self.next = Some(Tensor::from_data(data, device));
    }

    /// Trained numbers.
    pub fn parameters(&self) -> usize {
        burn::module::Module::num_params(&self.model)
    }

    /// Bytes of all caches.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(AttentionCache::bytes).sum()
    }
}

/// `[batch, 1]` of `[batch, 256]`.
fn most_likely(logits: Tensor<2>) -> Tensor<2, Int> {
    logits.argmax(1)
}

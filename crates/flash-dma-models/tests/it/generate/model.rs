//! A small decoder with random parameters: its text means nothing, but every way of generating gives the same.

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, Scores, Selection,
};
use flash_dma_models::LanguageModel;
use flash_dma_models::generate::Event;
use std::cell::RefCell;
use std::ops::ControlFlow;
use std::sync::Mutex;

/// Tokens of the vocabulary.
pub const VOCABULARY: usize = 48;

const WIDTH: usize = 32;

// ANCHOR: decoder
/// A decoder whose layers' only memory is their caches.
#[derive(Module, Debug)]
pub struct Model {
    embedding: Embedding,
    norms: Vec<RmsNorm>,
    layers: Vec<DynamicMaskAttention>,
    answer: Linear,
}

impl LanguageModel for Model {
    fn vocabulary(&self) -> usize {
        self.embedding.weight.dims()[0]
    }

    fn max_len(&self) -> Option<usize> {
        Some(256)
    }

    fn device(&self) -> Device {
        self.embedding.weight.val().device()
    }

    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        let cache = |layer: &DynamicMaskAttention| layer.try_init_cache(sequences);
        self.layers.iter().map(cache).collect()
    }

    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError> {
        let len = tokens.dims()[1];
        let mut x = self.embedding.forward(tokens);
        for ((norm, layer), cache) in self.norms.iter().zip(&self.layers).zip(caches) {
            x = x.clone() + layer.try_forward_cached(norm.forward(x), cache)?;
        }
        // The logits are large, so only those of the requested rows.
        Ok(self.answer.forward(x.narrow(1, len - rows, rows)))
    }
}
// ANCHOR_END: decoder

impl Model {
    /// A layer with a window, recent keys and sinks, one that keeps every key, and one with a window.
    pub fn new(seed: u64) -> Self {
        // The device's generator belongs to the whole process.
        static GENERATOR: Mutex<()> = Mutex::new(());
        let _guard = GENERATOR.lock();
        let device = Device::flex();
        device.seed(seed);
        let attention = |selection| {
            DynamicMaskAttentionConfig::new(WIDTH, 4)
                .with_n_kv_heads(Some(2))
                .with_scores(Scores::Added)
                .with_selection(selection)
                .with_rope(Some(Rope::new(256)))
                // Large weights, so that the text depends on the layers' memory.
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: 0.7,
                })
        };
        let layers = vec![
            attention(Selection::keep(12).with_sinks(1)).init(&device),
            attention(Selection::new()).init(&device),
            attention(Selection::keep(8).with_recent(Some(0))).init(&device),
        ];
        let model = Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device),
            norms: vec![RmsNormConfig::new(WIDTH).init(&device); layers.len()],
            layers,
            answer: LinearConfig::new(WIDTH, VOCABULARY).init(&device),
        };
        // Parameters are drawn on first use: here, where no other test draws.
        model.whole(&[0]);
        model
    }

    fn tokens(&self, text: &[u32]) -> Tensor<2, Int> {
        let tokens: Vec<i32> = text.iter().map(|&token| token as i32).collect();
        let tokens = TensorData::new(tokens, [1, text.len()]);
        Tensor::from_data(tokens, &self.device())
    }

    /// Log probabilities after each token, by attention over all of them at once.
    pub fn whole(&self, text: &[u32]) -> Vec<Vec<f32>> {
        let mut x = self.embedding.forward(self.tokens(text));
        for (norm, layer) in self.norms.iter().zip(&self.layers) {
            x = x.clone() + layer.forward(norm.forward(x));
        }
        let rows = log_softmax(self.answer.forward(x), 2).try_into_vec_as::<f32>();
        let rows = rows.expect("the device works");
        rows.chunks(VOCABULARY).map(<[f32]>::to_vec).collect()
    }

    /// Logits after a text that is read at once.
    pub fn logits(&self, text: &[u32]) -> Vec<f32> {
        let mut caches = self.try_init_caches(1).expect("the layers can be cached");
        let logits = self.try_read(self.tokens(text), 1, &mut caches);
        let logits = logits.expect("the text can be read");
        logits.try_into_vec_as::<f32>().expect("the device works")
    }

    /// Greedy text after a prompt, without caches.
    pub fn greedy(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut text = prompt.to_vec();
        for _ in 0..count {
            let rows = self.whole(&text);
            let last = rows.last().expect("a prompt has a token");
            let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
            text.push(best.expect("the vocabulary has tokens") as u32);
        }
        text.split_off(prompt.len())
    }
}

/// A prompt of `len` tokens.
pub fn prompt(len: usize, seed: usize) -> Vec<u32> {
    let token = |n| ((n * n + 7 * n + 13 * seed) % 43) as u32;
    (0..len).map(token).collect()
}

/// A callback that never stops.
pub fn go_on(_: Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// One call of a decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// Sequences of the batch.
    pub sequences: usize,
    /// Tokens of each.
    pub len: usize,
    /// Bytes of the caches with windows, afterwards.
    pub bytes: usize,
}

/// A decoder that records its calls.
pub struct Watched<M> {
    inner: M,
    /// Maximum length, instead of the decoder's own limit.
    pub max_len: Option<usize>,
    /// True to return the logits of every token, whatever was requested.
    pub talkative: bool,
    reads: RefCell<Vec<Read>>,
}

impl<M> Watched<M> {
    pub fn new(inner: M) -> Self {
        Self {
            inner,
            max_len: None,
            talkative: false,
            reads: RefCell::default(),
        }
    }

    /// Calls since the last time.
    pub fn reads(&self) -> Vec<Read> {
        self.reads.take()
    }
}

impl<M: LanguageModel> LanguageModel for Watched<M> {
    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn max_len(&self) -> Option<usize> {
        self.max_len.or(self.inner.max_len())
    }

    fn device(&self) -> Device {
        self.inner.device()
    }

    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        self.inner.try_init_caches(sequences)
    }

    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError> {
        let [sequences, len] = tokens.dims();
        let rows = if self.talkative { len } else { rows };
        let logits = self.inner.try_read(tokens, rows, caches);
        let is_window = |cache: &&AttentionCache| matches!(cache, AttentionCache::DynamicMask(_));
        let windows = caches.iter().filter(is_window);
        let bytes = windows.map(AttentionCache::bytes).sum();
        self.reads.borrow_mut().push(Read {
            sequences,
            len,
            bytes,
        });
        logits
    }
}

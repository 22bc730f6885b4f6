//! Generation with caches, as in the book: a prompt in chunks, greedy text, beams, saving and resuming.

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::store::ModuleRecord;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, Selection};
use std::error::Error;
use std::path::Path;

const VOCABULARY: usize = 64;
const WIDTH: usize = 32;
const LAYERS: usize = 2;
const WINDOW: usize = 16;

// ANCHOR: model
/// A decoder whose layers' only memory is their caches.
#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    norms: Vec<RmsNorm>,
    layers: Vec<DynamicMaskAttention>,
    answer: Linear,
}

impl Model {
    /// An empty cache per layer, for this many sequences.
    fn caches(&self, sequences: usize) -> Vec<AttentionCache> {
        let cache = |layer: &DynamicMaskAttention| layer.init_cache(sequences);
        self.layers.iter().map(cache).collect()
    }

    /// Logits of the token after the last of `tokens`, `[sequences, vocabulary]`. The tokens continue those in the
    /// caches.
    fn read(
        &self,
        tokens: Tensor<2, Int>,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<2>, AttentionError> {
        let len = tokens.dims()[1];
        let mut x = self.embedding.forward(tokens);
        for ((norm, layer), cache) in self.norms.iter().zip(&self.layers).zip(caches) {
            x = x.clone() + layer.try_forward_cached(norm.forward(x), cache)?;
        }
        let last = x.narrow(1, len - 1, 1).squeeze_dim(1);
        Ok(self.answer.forward::<2>(last))
    }
}
// ANCHOR_END: model

impl Model {
    /// With random parameters: its text means nothing, but every way of generating gives the same.
    fn new(device: &Device) -> Self {
        let attention = DynamicMaskAttentionConfig::new(WIDTH, 4)
            .with_n_kv_heads(Some(2))
            .with_selection(Selection::keep(WINDOW))
            .with_rope(Some(Rope::new(256)))
            // Large weights, so that the text depends on the layers' memory.
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.3,
            });
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            norms: vec![RmsNormConfig::new(WIDTH).init(device); LAYERS],
            layers: (0..LAYERS).map(|_| attention.init(device)).collect(),
            answer: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    /// Log probability of the last `count` tokens given the others, by attention over all of them at once.
    fn log_probability(&self, text: &[i32], count: usize, device: &Device) -> f32 {
        let mut x = self.embedding.forward(tensor(&[text.to_vec()], device));
        for (norm, layer) in self.norms.iter().zip(&self.layers) {
            x = x.clone() + layer.forward(norm.forward(x));
        }
        let rows: Tensor<2> = log_softmax(self.answer.forward(x), 2).squeeze_dim(0);
        let rows = floats(rows);
        let ends = text.len() - count..text.len();
        let of = |at: usize| rows[(at - 1) * VOCABULARY + text[at] as usize];
        ends.map(of).sum()
    }
}

/// Sequences of one length.
fn tensor(sequences: &[Vec<i32>], device: &Device) -> Tensor<2, Int> {
    let shape = [sequences.len(), sequences[0].len()];
    Tensor::from_data(TensorData::new(sequences.concat(), shape), device)
}

fn floats(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

// ANCHOR: greedy
/// Reads a prompt in chunks and writes the most likely tokens.
fn greedy(
    model: &Model,
    prompt: &[i32],
    chunk: usize,
    count: usize,
) -> Result<Vec<i32>, AttentionError> {
    let device = model.embedding.weight.val().device();
    let mut caches = model.caches(1);
    let mut logits = None;
    for chunk in prompt.chunks(chunk) {
        logits = Some(model.read(tensor(&[chunk.to_vec()], &device), &mut caches)?);
    }
    let mut logits = logits.expect("a prompt has a token");
    let mut text = Vec::new();
    for _ in 0..count {
        let token = logits.argmax(1);
        logits = model.read(token.clone(), &mut caches)?;
        text.push(token.into_scalar::<i32>());
    }
    Ok(text)
}
// ANCHOR_END: greedy

// ANCHOR: beams
/// Continues from caches of one sequence and returns the best of `beams` texts, with its log probability.
fn beam_search(
    model: &Model,
    mut logits: Tensor<2>,
    caches: &mut [AttentionCache],
    beams: usize,
    count: usize,
) -> Result<(Vec<i32>, f32), AttentionError> {
    let device = logits.device();
    let mut texts = vec![(Vec::new(), 0.0)];
    for _ in 0..count {
        // Every text with every next token: (log probability, text, token).
        let rows = floats(log_softmax(logits, 1));
        let rows = rows.chunks(VOCABULARY).enumerate();
        let mut next: Vec<(f32, usize, i32)> = rows
            .flat_map(|(from, row)| {
                let sum = texts[from].1;
                (0..)
                    .zip(row)
                    .map(move |(token, log)| (sum + log, from, token))
            })
            .collect();
        next.sort_by(|a, b| b.0.total_cmp(&a.0));
        next.truncate(beams);
        // A cache is kept as often as its text was chosen.
        let from: Vec<usize> = next.iter().map(|&(_, from, _)| from).collect();
        caches.iter_mut().for_each(|cache| cache.reorder(&from));
        let tokens: Vec<Vec<i32>> = next.iter().map(|&(_, _, token)| vec![token]).collect();
        logits = model.read(tensor(&tokens, &device), caches)?;
        let longer = next.into_iter();
        texts = longer
            .map(|(sum, from, token)| ([&texts[from].0[..], &[token]].concat(), sum))
            .collect();
    }
    Ok(texts.swap_remove(0))
}
// ANCHOR_END: beams

// ANCHOR: save
/// Writes a file per layer.
fn save(caches: &[AttentionCache], folder: &Path) -> Result<(), Box<dyn Error>> {
    for (layer, cache) in caches.iter().enumerate() {
        let AttentionCache::DynamicMask(cache) = cache else {
            return Err("every layer has a window".into());
        };
        let record = cache.to_module_record_sync();
        record.save(folder.join(format!("cache-{layer}.bpk")))?;
    }
    Ok(())
}

/// Restores saved caches, for the model that they were made for.
fn load(model: &Model, folder: &Path) -> Result<Vec<AttentionCache>, Box<dyn Error>> {
    let load = |(layer, empty)| -> Result<AttentionCache, Box<dyn Error>> {
        let AttentionCache::DynamicMask(empty) = empty else {
            return Err("every layer has a window".into());
        };
        let record = ModuleRecord::load(folder.join(format!("cache-{layer}.bpk")))?;
        Ok(empty.try_load_module_record_sync(record)?.into())
    };
    model.caches(1).into_iter().enumerate().map(load).collect()
}
// ANCHOR_END: save

pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex();
    device.seed(7);
    let model = Model::new(&device);
    let prompt: Vec<i32> = (0..100).map(|n| n * n % 61).collect();

    let text = greedy(&model, &prompt, 32, 12)?;
    println!("greedy: {text:?}");
    for chunk in [1, 7, 100] {
        let same = greedy(&model, &prompt, chunk, 12)?;
        assert_eq!(same, text, "chunks of {chunk}");
    }

    let mut caches = model.caches(1);
    let logits = model.read(tensor(std::slice::from_ref(&prompt), &device), &mut caches)?;
    let bytes: usize = caches.iter().map(AttentionCache::bytes).sum();
    let tokens = caches[0].lengths()[0];
    println!("caches: {bytes} bytes after {tokens} tokens");

    let folder = std::env::temp_dir().join(format!("generation-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    save(&caches, &folder)?;
    let mut restored = load(&model, &folder)?;

    let (best, log) = beam_search(&model, logits.clone(), &mut caches, 4, 8)?;
    println!("beams: {best:?}, log probability {log:.3}");
    let whole = model.log_probability(&[&prompt[..], &best].concat(), 8, &device);
    assert!((log - whole).abs() < 1e-3, "{log} is not {whole}");

    let (again, _) = beam_search(&model, logits, &mut restored, 4, 8)?;
    assert_eq!(again, best);
    println!("restored: the same text");
    // Not before: Burn reads the tensors of a record on first use.
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

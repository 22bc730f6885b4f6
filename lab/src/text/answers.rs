//! Answers after prompts of several lengths, which the model reads through its layers' caches.

use super::bytes;
use super::needles::{DIGITS, Kind, Needles, Prompt};
use crate::settings::Settings;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use flash_dma_models::LanguageModel;
use flash_dma_models::nn::Decoder;
use serde::{Deserialize, Serialize};

/// Lengths of prompts, in training lengths.
pub const FACTORS: [usize; 4] = [1, 2, 4, 8];

/// Position of the fact in the running text, as a share of it.
pub const DEPTHS: [f64; 5] = [0.1, 0.3, 0.5, 0.7, 0.9];

/// Share of right answers to prompts of one length, kind and depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answered {
    /// Bytes of a prompt with its answer.
    pub length: usize,
    /// Kind of the fact.
    pub kind: Kind,
    /// Position of the fact, as a share of the running text.
    pub depth: f64,
    /// Share of answers with all digits right.
    pub right: f64,
    /// Share of right digits.
    pub digits: f64,
}

/// Memory of all layers after texts of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheBytes {
    /// Bytes of a prompt with its answer.
    pub length: usize,
    /// Bytes of a text in all layers' caches: caches of slots count as a whole, caches of pages with those in use.
    pub bytes: usize,
    /// Bytes including free pages, divided among the texts read at once.
    pub reserved: usize,
}

/// A model's answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// By length, kind and depth.
    pub answered: Vec<Answered>,
    /// By length.
    pub caches: Vec<CacheBytes>,
}

/// Asks a model for every length, kind and depth.
pub fn ask(
    model: &Decoder,
    needles: &Needles,
    settings: &Settings,
    device: &Device,
) -> Result<Answers, AttentionError> {
    let model = model.for_generation();
    let (mut answered, mut caches) = (Vec::new(), Vec::new());
    for length in FACTORS.map(|factor| factor * settings.tokens) {
        let mut most = [0; 2];
        let kinds = Kind::ALL.into_iter();
        for (kind, depth) in kinds.flat_map(|kind| DEPTHS.map(|depth| (kind, depth))) {
            let prompt = |index| needles.prompt(length, kind, depth, index);
            let prompts: Vec<Prompt> = (0..settings.texts).map(prompt).collect();
            let texts: Vec<&[u8]> = prompts.iter().map(|prompt| &prompt.bytes[..]).collect();
            let written = write(&model, &texts, settings.tokens, DIGITS, device)?;
            most = [0, 1].map(|n| most[n].max(written.cache_bytes[n] / settings.texts));
            let count = prompts.len() as f64;
            let pairs = || written.answers.iter().zip(&prompts);
            let right = |(written, prompt): (&Vec<u8>, &Prompt)| {
                let digits = written.iter().zip(&prompt.answer);
                digits.filter(|(a, b)| a == b).count()
            };
            answered.push(Answered {
                length,
                kind,
                depth,
                right: pairs().filter(|&pair| right(pair) == DIGITS).count() as f64 / count,
                digits: pairs().map(right).sum::<usize>() as f64 / count / DIGITS as f64,
            });
        }
        caches.push(CacheBytes {
            length,
            bytes: most[0],
            reserved: most[1],
        });
    }
    Ok(Answers { answered, caches })
}

/// Bytes a model wrote after texts.
#[derive(Clone, Debug)]
pub struct Written {
    /// Bytes after each text.
    pub answers: Vec<Vec<u8>>,
    /// Bytes of all layers' caches at the end: in use, and reserved.
    pub cache_bytes: [usize; 2],
}

/// Reads texts of equal length in chunks, and writes the `count` most likely bytes after each, one at a time. The
/// model must be [`for_generation`](Decoder::for_generation).
pub fn write(
    model: &Decoder,
    texts: &[&[u8]],
    chunk: usize,
    count: usize,
    device: &Device,
) -> Result<Written, AttentionError> {
    let mut caches = model.try_init_caches(texts.len())?;
    let mut logits = None;
    for start in (0..texts[0].len()).step_by(chunk) {
        let end = (start + chunk).min(texts[0].len());
        let tokens = bytes(texts.iter().map(|text| &text[start..end]), device);
        logits = Some(model.try_read(tokens, 1, &mut caches)?);
    }
    let next = |logits: Tensor<3>| -> Tensor<2, Int> { logits.argmax(2).flatten(1, 2) };
    let mut written = vec![next(logits.expect("the texts have bytes"))];
    while written.len() < count {
        // The byte stays on the device: nothing is read before the last one.
        let last = written[written.len() - 1].clone();
        written.push(next(model.try_read(last, 1, &mut caches)?));
    }
    let written = Tensor::cat(written, 1).into_data();
    let written: Vec<i64> = written.iter::<i64>().collect();
    let byte = |&token: &i64| u8::try_from(token).expect("the vocabulary is the bytes");
    let texts = written.chunks(count);
    Ok(Written {
        answers: texts.map(|text| text.iter().map(byte).collect()).collect(),
        cache_bytes: [
            caches.iter().map(used_bytes).sum(),
            caches.iter().map(AttentionCache::bytes).sum(),
        ],
    })
}

/// Bytes of a cache, without its free pages.
fn used_bytes(cache: &AttentionCache) -> usize {
    match cache {
        AttentionCache::DynamicMask(cache) => cache.bytes(),
        AttentionCache::Paged(cache) => {
            let config = cache.config();
            let score = if config.scored { size_of::<f32>() } else { 0 };
            let token = 2 * config.head_dim * DType::from(config.dtype).size() + score;
            cache.used_pages() * config.page_len * config.kv_heads * token
        }
    }
}

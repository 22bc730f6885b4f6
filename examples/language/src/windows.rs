//! Windows of a corpus to train on and to validate with.
//!
//! Validation text is a number of long windows, of the longest length evaluated. The windows of the training length are
//! the pieces of the same windows, so both evaluations predict the same bytes.

use crate::train::{Batch, Lessons, batch_of};
use burn::tensor::Device;
use train_text::data::{Corpus, Text};
use train_text::error::Error;
use train_text::rng::Rng;

/// The most validation windows during training.
const WATCHED: usize = 32;

/// A corpus cut into training and validation text.
pub struct Windows {
    text: Text,
    tokens: usize,
    factor: usize,
    /// Where the long validation windows start.
    starts: Vec<usize>,
}

impl Windows {
    /// Windows of `tokens` bytes, and for validation about `most` of them, in windows `factor` times as long.
    ///
    /// # Errors
    ///
    /// [`Error::TinyCorpus`] if the corpus is too short.
    pub fn new(corpus: Corpus, tokens: usize, factor: usize, most: usize) -> Result<Self, Error> {
        let text = Text::split(corpus, factor * tokens)?;
        let starts = text.valid_starts(most.div_ceil(factor));
        Ok(Self {
            text,
            tokens,
            factor,
            starts,
        })
    }

    /// A random training window of `len` bytes, whatever `len` up to the longest is.
    pub fn training(&self, len: usize, random: &mut Rng) -> &[u8] {
        &self.text.window(self.text.random_train_start(random))[..len]
    }

    /// A random stretch of `len` bytes of the validation text.
    pub fn validating(&self, len: usize, random: &mut Rng) -> &[u8] {
        let start = self.starts[random.below(self.starts.len())];
        &self.text.window(start)[..len]
    }

    /// The validation windows of the longest length, each with the byte behind it.
    pub fn long(&self) -> Vec<&[u8]> {
        (self.starts.iter())
            .map(|&start| self.text.window(start))
            .collect()
    }

    /// The validation windows of the training length, each with the byte behind it.
    pub fn short(&self) -> Vec<&[u8]> {
        let pieces = |window| {
            (0..self.factor).map(move |piece| {
                let window: &[u8] = window;
                &window[piece * self.tokens..=(piece + 1) * self.tokens]
            })
        };
        self.long().into_iter().flat_map(pieces).collect()
    }
}

impl Lessons for Windows {
    fn batch(&self, seed: u64, step: usize, size: usize, device: &Device) -> Batch {
        let windows: Vec<&[u8]> = (0..size)
            .map(|item| {
                let mut random = Rng::new(seed, (step * size + item) as u64);
                self.training(self.tokens + 1, &mut random)
            })
            .collect();
        batch_of(&windows, device)
    }

    fn validation(&self, size: usize, device: &Device) -> Vec<Batch> {
        let all = self.short();
        let kept = WATCHED.min(all.len());
        let kept: Vec<&[u8]> = (0..kept).map(|n| all[n * all.len() / kept]).collect();
        let batches = kept.chunks(size);
        batches.map(|batch| batch_of(batch, device)).collect()
    }
}

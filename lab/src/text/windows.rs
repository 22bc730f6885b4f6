//! Windows of a corpus to train on and to validate with.
//!
//! Validation text is a number of long windows, of the longest length evaluated. The windows of the training length are
//! the pieces of the same windows, so both evaluations predict the same bytes.

use super::Batch;
use super::corpus::Corpus;
use crate::Result;
use crate::rng::Rng;
use burn::tensor::Device;

/// The most validation windows during training.
const WATCHED: usize = 32;

/// One part in so many of a corpus, its end, is validation text.
const VALID_SHARE: usize = 10;

/// A corpus cut into training and validation text.
#[derive(Debug)]
pub struct Windows<'a> {
    train: &'a [u8],
    valid: &'a [u8],
    tokens: usize,
    factor: usize,
    /// Where the long validation windows start.
    starts: Vec<usize>,
}

impl<'a> Windows<'a> {
    /// Windows of `tokens` bytes, and for validation about `most` of them, in windows `factor` times as long: evenly
    /// spread, no target byte in two of them.
    pub fn new(corpus: &'a Corpus, tokens: usize, factor: usize, most: usize) -> Result<Self> {
        let (longest, len) = (factor * tokens, corpus.bytes.len());
        let needed = (longest + 1) * VALID_SHARE;
        if len < needed {
            let source = corpus.source.display();
            return Err(format!(
                "{source}: {len} bytes are too few for windows of {longest}: at least {needed} are needed"
            )
            .into());
        }
        let (train, valid) = corpus.bytes.split_at(len - len / VALID_SHARE);
        let all = (valid.len() - 1) / longest;
        let kept = most.div_ceil(factor).min(all);
        Ok(Self {
            train,
            valid,
            tokens,
            factor,
            starts: (0..kept).map(|n| n * all / kept * longest).collect(),
        })
    }

    /// A random training window of `len` bytes, whatever `len` up to the longest and the byte behind it is.
    pub fn training(&self, len: usize, random: &mut Rng) -> &'a [u8] {
        let start = random.below(self.train.len() - self.factor * self.tokens);
        &self.train[start..start + len]
    }

    /// A random stretch of `len` bytes of the validation text.
    pub fn validating(&self, len: usize, random: &mut Rng) -> &'a [u8] {
        let start = self.starts[random.below(self.starts.len())];
        &self.valid[start..start + len]
    }

    /// The validation windows of the longest length, each with the byte behind it.
    pub fn long(&self) -> Vec<&'a [u8]> {
        let longest = self.factor * self.tokens;
        let window = |&start: &usize| &self.valid[start..=start + longest];
        self.starts.iter().map(window).collect()
    }

    /// The validation windows of the training length, each with the byte behind it.
    pub fn short(&self) -> Vec<&'a [u8]> {
        let pieces = |window: &'a [u8]| {
            (0..self.factor)
                .map(move |piece| &window[piece * self.tokens..=(piece + 1) * self.tokens])
        };
        self.long().into_iter().flat_map(pieces).collect()
    }

    /// The texts of `tokens` bytes with the numbers `first..first + size` of a seed's training.
    pub fn batch(&self, seed: u64, [first, size, tokens]: [usize; 3], device: &Device) -> Batch {
        let window = |item| self.training(tokens + 1, &mut Rng::new(seed, item as u64));
        let windows: Vec<&[u8]> = (first..first + size).map(window).collect();
        Batch::new(&windows, device)
    }

    /// What to validate with during training, of `size` texts at a time.
    pub fn validation(&self, size: usize, device: &Device) -> Vec<Batch> {
        let all = self.short();
        let kept = WATCHED.min(all.len());
        let kept: Vec<&[u8]> = (0..kept).map(|n| all[n * all.len() / kept]).collect();
        let batches = kept.chunks(size);
        batches.map(|batch| Batch::new(batch, device)).collect()
    }
}

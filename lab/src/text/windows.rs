//! Windows of a corpus for training and validation.
//!
//! A corpus is cut into blocks, whose ends are validation text, so that it covers the same kinds of text as the
//! training text. Validation text consists of long windows, of the longest length evaluated. The windows of the
//! training length are the pieces of the same windows, so both evaluations predict the same bytes.

use super::Batch;
use super::corpus::Corpus;
use crate::Result;
use crate::rng::Rng;
use burn::tensor::Device;
use std::ops::Range;

/// Maximum number of validation windows during training.
const WATCHED: usize = 32;

/// One part in this many of a block, its end, is validation text.
const VALID_SHARE: usize = 10;

/// Maximum number of blocks.
const MOST_BLOCKS: usize = 16;

/// Minimum validation text of a block, in longest windows, if the corpus is long enough.
const WINDOWS_A_BLOCK: usize = 4;

/// A corpus cut into training and validation text.
#[derive(Debug)]
pub struct Windows<'a> {
    bytes: &'a [u8],
    /// Training text of each block.
    train: Vec<Range<usize>>,
    tokens: usize,
    factor: usize,
    /// Starts of the long validation windows.
    starts: Vec<usize>,
}

impl<'a> Windows<'a> {
    /// Windows of `tokens` bytes, and for validation about `most` of them, in windows `factor` times as long: evenly
    /// spread, with no target byte in two of them.
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
        let blocks = (len / (needed * WINDOWS_A_BLOCK)).clamp(1, MOST_BLOCKS);
        let (mut train, mut all) = (Vec::new(), Vec::new());
        for block in 0..blocks {
            let (start, end) = (block * len / blocks, (block + 1) * len / blocks);
            let cut = end - (end - start) / VALID_SHARE;
            train.push(start..cut);
            all.extend((0..(end - cut - 1) / longest).map(|window| cut + window * longest));
        }
        let kept = most.div_ceil(factor).min(all.len());
        Ok(Self {
            bytes: &corpus.bytes,
            train,
            tokens,
            factor,
            starts: (0..kept).map(|n| all[n * all.len() / kept]).collect(),
        })
    }

    /// A random training window of `len` bytes, up to the longest length and its next byte.
    pub fn training(&self, len: usize, random: &mut Rng) -> &'a [u8] {
        let starts = |range: &Range<usize>| range.len() - self.factor * self.tokens;
        let mut at = random.below(self.train.iter().map(starts).sum());
        for range in &self.train {
            if at < starts(range) {
                let start = range.start + at;
                return &self.bytes[start..start + len];
            }
            at -= starts(range);
        }
        unreachable!("`at` is below the sum of all starts");
    }

    /// A random stretch of `len` bytes of the validation text.
    pub fn validating(&self, len: usize, random: &mut Rng) -> &'a [u8] {
        let start = self.starts[random.below(self.starts.len())];
        &self.bytes[start..start + len]
    }

    /// Validation windows of the longest length, each with the next byte.
    pub fn long(&self) -> Vec<&'a [u8]> {
        let longest = self.factor * self.tokens;
        let window = |&start: &usize| &self.bytes[start..=start + longest];
        self.starts.iter().map(window).collect()
    }

    /// Validation windows of the training length, each with the next byte.
    pub fn short(&self) -> Vec<&'a [u8]> {
        let pieces = |window: &'a [u8]| {
            (0..self.factor)
                .map(move |piece| &window[piece * self.tokens..=(piece + 1) * self.tokens])
        };
        self.long().into_iter().flat_map(pieces).collect()
    }

    /// Texts of `tokens` bytes, number `first..first + size` of a seed's training.
    pub fn batch(&self, seed: u64, [first, size, tokens]: [usize; 3], device: &Device) -> Batch {
        let window = |item| self.training(tokens + 1, &mut Rng::new(seed, item as u64));
        let windows: Vec<&[u8]> = (first..first + size).map(window).collect();
        Batch::new(&windows, device)
    }

    /// Texts for validation during training, `size` at a time.
    pub fn validation(&self, size: usize, device: &Device) -> Vec<Batch> {
        let all = self.short();
        let kept = WATCHED.min(all.len());
        let kept: Vec<&[u8]> = (0..kept).map(|n| all[n * all.len() / kept]).collect();
        let batches = kept.chunks(size);
        batches.map(|batch| Batch::new(batch, device)).collect()
    }
}

//! Going on with a text, byte by byte: a model with its caches, and the draw of the next byte.

use burn::prelude::*;
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use flash_dma_models::Decoder as _;
use flash_dma_models::generate::{Draw, Purpose, Sampler};
use flash_dma_models::nn::Decoder;

use crate::error::Error;

/// A model that has read some bytes and says what may follow.
///
/// Each layer keeps the window's keys and nothing else, so a byte costs the same after a hundred bytes and
/// after a million.
pub struct Generator {
    model: Decoder,
    caches: Vec<AttentionCache>,
    device: Device,
    read: usize,
}

impl Generator {
    /// The model with empty caches, on its own device.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the model's attention cannot be cached.
    pub fn new(model: &Decoder) -> Result<Self, AttentionError> {
        let model = model.for_generation();
        Ok(Self {
            caches: model.try_init_caches(1)?,
            device: model.device(),
            model,
            read: 0,
        })
    }

    /// Reads `bytes` and returns the logits of the byte that follows the last of them. Many bytes at once are
    /// read like a training sequence.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Positions`] past 2^31 bytes.
    ///
    /// # Panics
    ///
    /// If there are no bytes, or the device fails.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Vec<f32>, AttentionError> {
        let logits = self.enqueue(bytes)?;
        let logits = logits.try_into_vec_as::<f32>();
        Ok(logits.expect("the logits can be read"))
    }

    /// As [`read`](Self::read), without waiting for the device.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn enqueue(&mut self, bytes: &[u8]) -> Result<Tensor<2>, AttentionError> {
        assert!(!bytes.is_empty(), "a model predicts the byte after another");
        let tokens: Vec<i32> = bytes.iter().map(|&byte| byte.into()).collect();
        let tokens = Tensor::from_data(TensorData::new(tokens, [1, bytes.len()]), &self.device);
        let logits = self.model.try_read(tokens, 1, &mut self.caches)?;
        self.read += bytes.len();
        Ok(logits.flatten(0, 1))
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.caches.iter_mut().for_each(|cache| cache.reset(0));
        self.read = 0;
    }

    /// Bytes read since the beginning or the last [`reset`](Self::reset).
    pub fn context(&self) -> usize {
        self.read
    }

    /// Bytes in use and bytes reserved on the device, for everything, if it tells.
    pub fn device_bytes(&self) -> Option<[u64; 2]> {
        let usage = self.device.memory_pool_usage()?;
        Some([usage.bytes_in_use, usage.bytes_reserved])
    }

    /// Bytes of memory that all caches take.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(AttentionCache::bytes).sum()
    }
}

/// How bytes are drawn: of the `top_k` most likely ones, or of all if that is 0, and of those whose probabilities reach
/// `top_p`.
///
/// # Errors
///
/// [`Error::Sample`] if a number is not in its range.
pub fn sampler(seed: u64, temperature: f64, top_k: usize, top_p: f64) -> Result<Sampler, Error> {
    let sampler = Sampler::random(seed)
        .with_temperature(temperature)
        .with_top_p(top_p);
    let sampler = match top_k {
        0 => sampler,
        count => sampler.with_top_k(count),
    };
    sampler.try_check()?;
    Ok(sampler)
}

/// Draws the byte that follows `written` others.
///
/// # Errors
///
/// [`Error::Sample`] if the logits give none: one is NaN, for example.
///
/// # Panics
///
/// If there are more than 256 logits.
pub fn draw(sampler: &Sampler, logits: &[f32], written: usize) -> Result<u8, Error> {
    let law = sampler.try_distribution(logits, &[])?;
    let token = law.at(sampler.unit(Draw {
        sequence: 0,
        token: written,
        purpose: Purpose::Token,
    }));
    Ok(u8::try_from(token).expect("the vocabulary is the bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_reach_the_sampler_and_are_checked() {
        let mut logits = vec![f32::NEG_INFINITY; 256];
        (logits[10], logits[20], logits[30]) = (0.0, 3.0, 1.0);
        let drawn = |temperature, top_k, top_p| {
            let sampler = sampler(5, temperature, top_k, top_p).unwrap();
            let mut bytes: Vec<u8> = (0..400)
                .map(|written| draw(&sampler, &logits, written).unwrap())
                .collect();
            bytes.sort_unstable();
            bytes.dedup();
            bytes
        };
        assert_eq!(drawn(1.0, 0, 1.0), [10, 20, 30]);
        assert_eq!(drawn(1.0, 2, 1.0), [20, 30]);
        assert_eq!(drawn(1.0, 0, 0.9), [20, 30]);
        assert_eq!(drawn(0.0, 0, 1.0), [20]);
        for (temperature, top_p) in [(-1.0, 1.0), (f64::NAN, 1.0), (1.0, 1.5)] {
            assert!(sampler(0, temperature, 0, top_p).is_err());
        }
        let nothing = draw(&Sampler::greedy(), &[f32::NAN; 256], 0);
        assert!(matches!(nothing, Err(Error::Sample(_))));
    }
}

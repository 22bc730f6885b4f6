//! Going on with a text, byte by byte: a model with its caches, and the draw of the next byte.

use burn::prelude::*;
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;

use crate::model::TextModel;
use crate::rng::Rng;

/// A model that has read some bytes and says what may follow.
///
/// Each layer keeps the window's keys and nothing else, so a byte costs the same after a hundred bytes and
/// after a million.
pub struct Generator {
    model: TextModel,
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
    pub fn new(model: &TextModel) -> Result<Self, AttentionError> {
        let model = model.for_generation();
        Ok(Self {
            caches: model.caches(1)?,
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
        let logits = self.model.forward_cached(tokens, &mut self.caches)?;
        self.read += bytes.len();
        Ok(logits)
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

/// How the next byte is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Sampler {
    /// Divides the logits; 0 takes the most likely byte.
    pub temperature: f64,
    /// Only this many of the most likely bytes are drawn; 0 is all of them.
    pub top_k: usize,
    /// Only the fewest most likely bytes whose probabilities reach this sum are drawn; 1 is all of them.
    pub top_p: f64,
}

impl Sampler {
    /// Draws a byte with probabilities `softmax(logits / temperature)`, cut off by `top_k` and `top_p`.
    ///
    /// # Panics
    ///
    /// If there are more than 256 logits, or none.
    pub fn pick(&self, logits: &[f32], rng: &mut Rng) -> u8 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Stable: of equal logits the first comes first. What is not a number comes last.
        order.sort_by(|&a, &b| rank(logits[b]).total_cmp(&rank(logits[a])));
        let best = order[0];
        let chosen = if self.temperature > 0.0 {
            self.draw(logits, &order, rng)
        } else {
            best
        };
        u8::try_from(chosen).expect("the vocabulary is the bytes")
    }

    /// `order` is that of the logits, the greatest first.
    fn draw(&self, logits: &[f32], order: &[usize], rng: &mut Rng) -> usize {
        let best = logits[order[0]];
        let weight = |i: usize| (f64::from(logits[i] - best) / self.temperature).exp();
        let kept = match self.top_k {
            0 => order,
            k => &order[..k.min(order.len())],
        };
        let total: f64 = kept.iter().map(|&i| weight(i)).sum();
        let mut sum = 0.0;
        let enough = kept.iter().position(|&i| {
            sum += weight(i);
            sum >= self.top_p * total
        });
        let kept = &kept[..=enough.unwrap_or(kept.len() - 1)];
        let mut at = rng.unit() * kept.iter().map(|&i| weight(i)).sum::<f64>();
        for &i in kept {
            at -= weight(i);
            if at < 0.0 {
                return i;
            }
        }
        order[0]
    }
}

fn rank(logit: f32) -> f32 {
    if logit.is_nan() {
        f32::NEG_INFINITY
    } else {
        logit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sampler = Sampler {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
    };

    /// How often each byte is drawn of 4000 times.
    fn counts(sampler: Sampler, logits: &[f32]) -> [usize; 256] {
        let mut rng = Rng::new(5, 0);
        let mut counts = [0; 256];
        for _ in 0..4000 {
            counts[usize::from(sampler.pick(logits, &mut rng))] += 1;
        }
        counts
    }

    fn logits() -> Vec<f32> {
        let mut logits = vec![f32::NEG_INFINITY; 256];
        logits[10] = 0.0;
        logits[20] = 3f32.ln();
        logits
    }

    #[test]
    fn temperature_zero_takes_the_most_likely_byte() {
        let mut logits = vec![0.0; 256];
        logits[65] = 3.0;
        let sampler = Sampler {
            temperature: 0.0,
            ..ALL
        };
        assert_eq!(sampler.pick(&logits, &mut Rng::new(0, 0)), 65);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let twenties = counts(ALL, &logits())[20];
        assert!(
            (2900..3100).contains(&twenties),
            "{twenties} of 4000, expected 3000"
        );
        // At half the temperature the odds are 1 to 9.
        let cold = Sampler {
            temperature: 0.5,
            ..ALL
        };
        let twenties = counts(cold, &logits())[20];
        assert!(
            (3520..3680).contains(&twenties),
            "{twenties} of 4000, expected 3600"
        );
    }

    #[test]
    fn unlikely_bytes_are_cut_off() {
        let mut logits = logits();
        logits[30] = 1.5f32.ln();
        // Weights 3, 1.5, 1: two are kept by number, and two reach four fifths.
        for sampler in [Sampler { top_k: 2, ..ALL }, Sampler { top_p: 0.8, ..ALL }] {
            let counts = counts(sampler, &logits);
            assert_eq!(counts[10], 0);
            assert_eq!(counts[20] + counts[30], 4000);
            assert!((2567..2767).contains(&counts[20]), "{} of 4000", counts[20]);
        }
        let one = counts(Sampler { top_p: 0.0, ..ALL }, &logits);
        assert_eq!(one[20], 4000);
    }
}

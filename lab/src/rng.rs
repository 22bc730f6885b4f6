//! Random numbers of texts: a number depends only on its seed, its stream and its index, on any device.

use rand::rngs::ChaCha8Rng;
use rand::{Rng as _, SeedableRng};

/// A stream of ChaCha8.
#[derive(Debug)]
pub struct Rng(ChaCha8Rng);

impl Rng {
    /// The stream number `stream` of `seed`: streams are independent of each other.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Self(random)
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        // The high half of a 128-bit product: its bias is n / 2^64.
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }
}

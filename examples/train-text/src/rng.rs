//! The random numbers of the data order.
//!
//! Burn's generators belong to a device and carry a state from call to call. Here a number depends
//! on nothing but its seed and its index, so that a resumed run sees the same windows as an
//! uninterrupted one, on any device.

use rand::rngs::ChaCha8Rng;
use rand::{Rng as _, SeedableRng};

/// A stream of ChaCha8, the same on every machine.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_its_seed_and_number_alone() {
        let draw = |seed, stream| Rng::new(seed, stream).below(usize::MAX);
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn below_reaches_every_value_and_no_other() {
        let mut rng = Rng::new(7, 0);
        let mut counts = [0usize; 6];
        for _ in 0..6000 {
            counts[rng.below(6)] += 1;
        }
        assert!(
            counts.iter().all(|&c| (850..1150).contains(&c)),
            "{counts:?}"
        );
    }
}

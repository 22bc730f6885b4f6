//! The random numbers of the data order.
//!
//! Burn's generators belong to a device and carry a state from call to call. Here a number depends
//! on nothing but its seed and its index, so that a resumed run sees the same windows as an
//! uninterrupted one, on any device.

/// SplitMix64 (Steele, Lea, Flood 2014): a counter through a 64-bit mixer.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

impl Rng {
    /// The stream number `stream` of `seed`: streams are independent of each other.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self {
            state: mix(mix(seed).wrapping_add(stream.wrapping_mul(GOLDEN_GAMMA))),
        }
    }

    /// Sixty-four random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        // The high half of a 128-bit product: its bias is n / 2^64.
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_its_seed_and_number_alone() {
        let draw = |seed, stream| Rng::new(seed, stream).next_u64();
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

//! Random orders that need no memory.

/// A permutation of `0..len` by a key: each place is computed by itself, so an epoch of any length can be begun in its
/// middle. What it is must not change between versions, because saved states of a loader depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Permutation {
    len: u64,
    /// Half of the bits of the least power of four that is at least `len`.
    half: u32,
    keys: [u64; ROUNDS],
}

/// Rounds of the Feistel network.
const ROUNDS: usize = 6;

impl Permutation {
    /// The permutation of `0..len` by a seed and the number of an epoch.
    pub(super) fn new(len: usize, seed: u64, epoch: u64) -> Self {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let key = mix(mix(seed) ^ epoch);
        Self {
            len,
            half: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|round| mix(key.wrapping_add(round as u64))),
        }
    }

    /// The value at `place`, which must be less than the length.
    pub(super) fn at(&self, place: usize) -> usize {
        let mut value = place as u64;
        debug_assert!(value < self.len);
        // Walks along the cycle of the network until it is back in the range. It covers less than four times the range,
        // and the place itself is in it, so this ends.
        loop {
            value = self.network(value);
            if value < self.len {
                return value as usize;
            }
        }
    }

    /// A permutation of `0..4^half`.
    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (value >> self.half, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half | right
    }
}

/// The finaliser of SplitMix64, behind its increment.
fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_permuted() {
        for len in (1..=130).chain([255, 256, 257, 1 << 12, 40_000]) {
            for epoch in 0..3 {
                let order = Permutation::new(len, 5, epoch);
                let mut seen = vec![false; len];
                for place in 0..len {
                    let value = order.at(place);
                    assert!(!seen[value], "{value} twice in {len}");
                    seen[value] = true;
                }
            }
        }
    }

    #[test]
    fn orders_differ_by_seed_and_by_epoch_and_stay_the_same() {
        let order = |seed, epoch| -> Vec<usize> {
            let order = Permutation::new(10, seed, epoch);
            (0..10).map(|place| order.at(place)).collect()
        };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 2), order(2, 1));
    }

    #[test]
    fn every_value_is_as_likely_at_a_place() {
        // 16 values at a place and pairs of neighbours, over 32 000 seeds: 2000 and 133 are expected of each. The
        // standard deviations are 43 and 11.5; no count may be off by six of them.
        let mut counts = [[0i32; 16]; 2];
        let mut pairs = [[0i32; 16]; 16];
        for seed in 0..32_000 {
            let order = Permutation::new(16, seed, 3);
            let (first, second) = (order.at(0), order.at(1));
            counts[0][first] += 1;
            counts[1][second] += 1;
            pairs[first][second] += 1;
        }
        for count in counts.iter().flatten() {
            assert!((count - 2000).abs() < 260, "{count}");
        }
        for (first, row) in pairs.iter().enumerate() {
            for (second, count) in row.iter().enumerate() {
                assert!(first == second || (count - 133).abs() < 70, "{count}");
            }
        }
    }
}

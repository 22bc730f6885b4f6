//! Attention dropout: which pairs of a query and a key are dropped, computed from a seed and the pair's position alone.

use crate::AttentionError;

/// Dropout of the attention probabilities.
///
/// With `keep = 1 - rate` and `m(i, j)` either 0 or `1 / keep`, where 0 has probability `rate`:
///
/// - `out_i = sum_j m(i, j) p(i, j) v_j`, where `p(i, j) = exp(logit(i, j) - lse_i)` and the LSE are those without
///   dropout;
/// - `dv_j = sum_i m(i, j) p(i, j) dout_i`;
/// - `dlogit(i, j) = p(i, j) (m(i, j) dout_i . v_j - delta_i) + p(i, j) dlse_i`, where `delta_i = dout_i . out_i` has
///   dropout in `out`;
/// - runners-up get no mask: their gradient is as without dropout, except that the `out` in it is the computed one.
///
/// A dropped pair stays attended, with a factor of 0: NaN and infinity times 0 are NaN, as anywhere else.
///
/// The mask has no state. [`PairMask`] computes, for each query head of each sequence, each aligned position of a query
/// and each key index, whether the pair is dropped; the result is the same on every engine, and the backward pass
/// computes it again from the seed. The last queries of a sequence, alone, have the same mask as in the whole pass.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
pub struct Dropout {
    rate: f32,
    seed: u64,
}

/// A deserialised dropout before its rate is checked.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    rate: f32,
    seed: u64,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for Dropout {
    type Error = AttentionError;

    fn try_from(Unchecked { rate, seed }: Unchecked) -> Result<Self, Self::Error> {
        Self::new(rate, seed)
    }
}

impl Dropout {
    /// Creates a dropout that drops each pair with probability `rate`, from 0 to less than 1, by the mask of `seed`. A
    /// rate of 0 drops nothing.
    ///
    /// Masks of different seeds are independent, those of one seed are equal: use each seed for one call.
    ///
    /// # Errors
    ///
    /// [`AttentionError::DropoutRate`] for another rate.
    pub fn new(rate: f32, seed: u64) -> Result<Self, AttentionError> {
        if !(0.0..1.0).contains(&rate) {
            return Err(AttentionError::DropoutRate { rate });
        }
        Ok(Self { rate, seed })
    }

    /// The probability that a pair is dropped, as given.
    #[must_use]
    pub fn rate(self) -> f32 {
        self.rate
    }

    /// The seed of the mask.
    #[must_use]
    pub fn seed(self) -> u64 {
        self.seed
    }

    /// The mask that engines compute.
    #[must_use]
    pub fn mask(self) -> PairMask {
        // Below 2^32, and even, as words are odd; rates of less than 2^-7 have more bits than this and round down.
        let threshold = (f64::from(self.rate) * 2f64.powi(32)) as u32 & !1;
        let keep = 1.0 - f64::from(threshold) / 2f64.powi(32);
        let words = [self.seed as u32, (self.seed >> 32) as u32];
        PairMask {
            words,
            columns: mix(mix(words[0].wrapping_add(COLUMNS)) ^ words[1]),
            threshold,
            factor: (1.0 / keep) as f32,
        }
    }

    /// `self`, or `None` if it drops nothing.
    pub(crate) fn effective(self) -> Option<Self> {
        (self.mask().threshold > 0).then_some(self)
    }
}

/// The parameters of a dropout mask. A pair is dropped if its [`pair_word`] is less than the threshold.
///
/// The word of a pair is the product of its query's row word, made of seed, head and position, and its key's column
/// word, made of the seed and the key's index. An engine makes these once for a tile, so that a pair costs one
/// multiplication and one comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairMask {
    /// The lower and the upper half of the seed, for the words of heads.
    pub words: [u32; 2],
    /// The part of the column words that depends on the seed, see [`column_word`].
    pub columns: u32,
    /// The rate as a fraction of 2^32, rounded down to an even number.
    pub threshold: u32,
    /// `1 / (1 - rate)` of the rounded rate.
    pub factor: f32,
}

impl PairMask {
    /// The seed of one query head's row words; `head` counts over all sequences' heads: `sequence * q_heads + head`.
    #[must_use]
    pub fn head_word(&self, head: usize) -> u32 {
        let [low, high] = self.words;
        mix(mix(head as u32 ^ low).wrapping_add(high))
    }

    /// The factor of the probability of a pair: 0, or [`factor`](Self::factor).
    #[must_use]
    #[inline(always)]
    pub fn weight(&self, row: u32, column: u32) -> f32 {
        if pair_word(row, column) < self.threshold {
            0.0
        } else {
            self.factor
        }
    }
}

/// The word of a query's row, from its [head's word](PairMask::head_word) and its
/// [position](crate::Problem::dropout_position): an odd number.
#[must_use]
#[inline(always)]
pub fn row_word(head: u32, position: u32) -> u32 {
    mix(mix(position) ^ head) | 1
}

/// The word of a key's column, from the mask's [`columns`](PairMask::columns) and the key's index: an odd number.
#[must_use]
#[inline(always)]
pub fn column_word(columns: u32, key: u32) -> u32 {
    mix(key ^ columns) | 1
}

/// The word of a pair: the product of both words modulo 2^32, uniform over the odd numbers.
///
/// A product with an odd number is a permutation of them, so any two pairs are independent as far as the words of their
/// rows and columns are. In a rectangle of four pairs, the products of opposite pairs are equal, but the upper bits,
/// which decide, show nothing of it: each depends on all bits of the factors. Compare only the whole word, as its
/// lowest bits are poor.
#[must_use]
#[inline(always)]
pub fn pair_word(row: u32, column: u32) -> u32 {
    row.wrapping_mul(column)
}

/// Mixes the bits of `x`: each changes every bit of the result with a probability of about one half.
#[must_use]
#[inline(always)]
pub fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(MIX[0]);
    let x = (x ^ (x >> 15)).wrapping_mul(MIX[1]);
    x ^ (x >> 16)
}

/// Separates the words of columns from those of heads: 2^32 over the golden ratio.
const COLUMNS: u32 = 0x9e37_79b9;

/// The odd multipliers of [`mix`].
pub const MIX: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

#[cfg(test)]
mod tests;

//! What ranks compete for: the softmax of which they are the logits.

use crate::AttentionError;

/// The softmax whose logits the ranks of a head are, so that what some keys gain is charged to all.
///
/// A rank has no scale and no zero: only differences between the ranks of a head decide. Without this type each key gets
/// what it would gain, `g`, and a scorer whose tokens are alike in something learns that first, as all keys gain by it.
/// With it a key gets
///
/// ```text
/// g - share * sum of g,    share = t exp(c z) / sum of t exp(c z)
/// ```
///
/// where `z` is its score, `t` the number of positions at which its rank keeps it or it is a runner-up, `c` the
/// [`inverse_temperature`](Self::inverse_temperature), and both sums are over the keys of a head. So the ranks of a head
/// learn nothing as a whole, a key that is kept and useless falls, and where all keys gain, this is the gradient of the
/// cross-entropy between their shares of the gain and that softmax: it ends when the one is the other.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
pub struct RankSoftmax {
    inverse_temperature: f32,
}

#[cfg(feature = "serde")]
deserialize_by_new!(RankSoftmax {
    inverse_temperature: f64
});

/// `inverse_temperature` is a finite number.
impl Eq for RankSoftmax {}

impl RankSoftmax {
    /// With the factor on the scores, at least 0 and finite. With 0 all keys of a head are charged alike, in proportion to
    /// their positions.
    ///
    /// # Errors
    ///
    /// [`AttentionError::RankSoftmax`] for another number.
    pub fn new(inverse_temperature: f64) -> Result<Self, AttentionError> {
        let factor = inverse_temperature as f32;
        if !(inverse_temperature >= 0.0 && factor.is_finite()) {
            return Err(AttentionError::RankSoftmax {
                inverse_temperature,
            });
        }
        Ok(Self {
            inverse_temperature: factor,
        })
    }

    /// The factor on the scores.
    #[must_use]
    pub fn inverse_temperature(self) -> f32 {
        self.inverse_temperature
    }
}

/// All keys of a head are charged alike, in proportion to their positions: what lost least in running text, and in recall
/// beside heads that take turns and [kept keys that learn](crate::LeaveOneOut).
impl Default for RankSoftmax {
    fn default() -> Self {
        Self {
            inverse_temperature: 0.0,
        }
    }
}

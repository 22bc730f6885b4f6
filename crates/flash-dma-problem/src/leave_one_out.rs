//! What kept keys are worth: the gradient of their ranks.

use crate::AttentionError;

/// The gradient of the ranks of kept keys: what the loss would lose without each of them.
///
/// A key that a query keeps, with the weight `p = exp(logit - lse)`, gives its rank
///
/// ```text
/// p / (1 + besides - p) * dout . (v - out) - dlse * ln(1 - p / (1 + besides))
/// ```
///
/// which is what the output and the LSE have from the key, to first order in the loss: without it they would be those of
/// the other keys and, with the weight `besides`, of the output itself. That is what a runner-up's gradient is to a key
/// that is not kept. With `besides` 0 a key that has all of a query's weight would have nothing to be compared with; the
/// greatest factor of `dout . (v - out)` is `1 / besides`, where the gradient of a logit has 1.
///
/// Only pairs that the rank decides count: not those of a query's recent keys, and not those of sinks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
pub struct LeaveOneOut {
    besides: f32,
}

#[cfg(feature = "serde")]
deserialize_by_new!(LeaveOneOut { besides: f64 });

/// `besides` is a finite number.
impl Eq for LeaveOneOut {}

impl LeaveOneOut {
    /// With `besides`, at least `1e-4` and finite. At a 20th, which is the default, a key counts for at most 20 times what
    /// its logit learns.
    ///
    /// # Errors
    ///
    /// [`AttentionError::LeaveOneOut`] for another number.
    pub fn new(besides: f64) -> Result<Self, AttentionError> {
        // With less, `1 + besides - p` would be little more than the rounding of p.
        if !(besides >= 1e-4 && (besides as f32).is_finite()) {
            return Err(AttentionError::LeaveOneOut { besides });
        }
        Ok(Self {
            besides: besides as f32,
        })
    }

    /// The weight of the output itself.
    #[must_use]
    pub fn besides(self) -> f32 {
        self.besides
    }
}

impl Default for LeaveOneOut {
    fn default() -> Self {
        Self { besides: 0.05 }
    }
}

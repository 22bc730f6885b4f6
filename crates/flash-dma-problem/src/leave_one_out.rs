//! Rank gradients of kept keys, by leaving each key out.

/// The weight `b` of a query's own output among its other keys when one of its keys is left out.
///
/// A kept key that learns gets as its rank's gradient the change of the loss if it were left out. A key with the weight
/// `p = exp(logit - lse)` contributes
///
/// ```text
/// p / (1 + b - p) * dout . (v - out) - dlse * ln(1 - p / (1 + b))
/// ```
///
/// This is the key's effect on the output and the LSE, to first order in the loss: without the key they would be
/// computed from the other keys and, with weight `b`, from the output itself. It corresponds to a runner-up's gradient,
/// which is that of a key that is not kept. If `b` were 0, a key that has all of a query's weight would have nothing to
/// be compared with; as it is, the factor of `dout . (v - out)` is at most 20, where that of a logit's gradient is at
/// most 1.
///
/// Only pairs that are decided by rank count: not a query's recent keys, and not sinks.
pub const OWN_OUTPUT_WEIGHT: f32 = 0.05;

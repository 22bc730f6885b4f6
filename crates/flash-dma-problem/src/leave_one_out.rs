//! What kept keys are worth: the gradient of their ranks.

/// The weight of a query's own output beside its other keys, if a key that it keeps is left out.
///
/// Kept keys that learn get the gradient of what the loss would lose without each of them. A key that a query keeps, with
/// the weight `p = exp(logit - lse)`, gives its rank, with `b` for this weight,
///
/// ```text
/// p / (1 + b - p) * dout . (v - out) - dlse * ln(1 - p / (1 + b))
/// ```
///
/// which is what the output and the LSE have from the key, to first order in the loss: without it they would be those of
/// the other keys and, with the weight `b`, of the output itself. That is what a runner-up's gradient is to a key that is
/// not kept. With `b` 0 a key that has all of a query's weight would have nothing to be compared with. As it is, the factor
/// of `dout . (v - out)` is at most 20, where the gradient of a logit has at most 1.
///
/// Only pairs that the rank decides count: not those of a query's recent keys, and not those of sinks.
pub const OWN_OUTPUT_WEIGHT: f32 = 0.05;

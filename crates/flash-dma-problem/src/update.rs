//! An optimiser's update: the norm of all gradients, and a step of AdamW.

/// Numbers that the squares of all gradients are summed in, before these are added up.
pub const SQUARE_SUMS: usize = 512;

/// A step of AdamW with decoupled decay (Loshchilov and Hutter, 2019), in Burn's form. With the gradient `g`:
///
/// ```text
/// m = beta_1 * m + (1 - beta_1) * g
/// v = beta_2 * v + (1 - beta_2) * g²
/// p = p * (1 - rate * weight_decay) - rate * (m / (1 - beta_1^time)) / (sqrt(v / (1 - beta_2^time)) + epsilon)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub rate: f64,
    /// Share of the first moment that is kept.
    pub beta_1: f32,
    /// Share of the second moment that is kept.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Share of the parameter that a learning rate of 1 would take away.
    pub weight_decay: f32,
    /// Number of this step, from 1.
    pub time: usize,
}

impl AdamWStep {
    /// Divisors of both moments, which begin at 0: `1 − beta^time`.
    #[must_use]
    pub fn corrections(&self) -> [f32; 2] {
        let time = i32::try_from(self.time).unwrap_or(i32::MAX);
        [self.beta_1, self.beta_2].map(|beta| 1.0 - beta.powi(time))
    }

    /// Factor of the parameter: `1 − rate · weight_decay`.
    #[must_use]
    pub fn decay(&self) -> f64 {
        1.0 - self.rate * f64::from(self.weight_decay)
    }
}

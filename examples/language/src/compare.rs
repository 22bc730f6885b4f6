//! What an arm loses against another one on the same windows.

use std::fmt;

/// The 97.5 % quantile of the normal distribution.
const QUANTILE: f64 = 1.96;

/// The difference of two losses, paired over windows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The mean difference, in nats a byte.
    pub mean: f64,
    /// Half of the 95 % confidence interval, by the normal distribution: with a few windows it is too narrow.
    pub half_width: f64,
    /// The mean difference as a share of the other's loss.
    pub share: f64,
}

impl Difference {
    /// Of an arm's windows to the other's; `None` if they are not as many, or fewer than two.
    pub fn of(windows: &[f64], others: &[f64]) -> Option<Self> {
        let count = windows.len() as f64;
        if windows.len() != others.len() || windows.len() < 2 {
            return None;
        }
        let each = || windows.iter().zip(others).map(|(a, b)| a - b);
        let mean = each().sum::<f64>() / count;
        let variance = each().map(|d| (d - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self {
            mean,
            half_width: QUANTILE * (variance / count).sqrt(),
            share: mean * count / others.iter().sum::<f64>(),
        })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mean, half, share) = (self.mean, self.half_width, 100.0 * self.share);
        write!(f, "{mean:+.4} ± {half:.4} nats ({share:+.2} %)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_all_windows_share_is_certain() {
        let difference = Difference::of(&[1.5, 2.5, 3.5], &[1.0, 2.0, 3.0]).unwrap();
        assert_eq!((difference.mean, difference.half_width), (0.5, 0.0));
        assert_eq!(difference.share, 0.25);
        let spread = Difference::of(&[1.0, 3.0], &[1.0, 1.0]).unwrap();
        assert!((spread.half_width - 1.96).abs() < 1e-12);
        assert_eq!(Difference::of(&[1.0], &[1.0]), None);
    }
}

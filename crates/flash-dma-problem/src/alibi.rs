//! ALiBi: a bias of the logits that grows linearly with the distance between query and key, by a slope per query head.

use crate::AttentionError;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// ALiBi slopes (attention with linear biases, Press et al. 2022), one per query head.
///
/// Query `i` and key `j` of query head `h` are `distance(i, j) = |i + k_len - q_len - j|` apart: the last query is at
/// the last key, with causal masking and without.
///
/// - `logit(i, j) = softcap(scale * q_i . k_j) + bias(i, j) - slope_h * distance(i, j)`, where the bias is the key's
///   score or the bias of masked attention. ALiBi, like a bias, is added after the cap and is not scaled;
/// - the LSE and the logits of runners-up include it;
/// - keys are selected as without ALiBi: a selection depends on the scores alone;
/// - slopes are constants: no gradient flows into them. All other gradients are those of these logits.
///
/// With causal masking every visible key has `j <= i + k_len - q_len`, so with as many queries as keys the logit grows
/// by `slope_h * (j - i)`. Distances count the tokens of the tensors: in packed documents they are the distances within
/// a document, as long as it has as many queries as keys. In f32, distances from 2^24 on are rounded.
///
/// Slopes may be zero or negative. Equal slopes share memory, kept until the program ends: 4 bytes per head of each
/// list.
///
/// ```
/// # use flash_dma_problem::{AlibiSlopes, AttentionOptions};
/// let options = AttentionOptions::new().with_alibi(AlibiSlopes::standard(8));
/// assert_eq!(options.alibi.unwrap().values()[..2], [0.5, 0.25]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Vec<f32>", into = "Vec<f32>"))]
pub struct AlibiSlopes(&'static [f32]);

/// Every list of slopes made so far, by its bits.
static LISTS: Mutex<BTreeMap<Vec<u32>, &'static [f32]>> = Mutex::new(BTreeMap::new());

impl AlibiSlopes {
    /// Creates slopes `[q_heads]`.
    ///
    /// # Errors
    ///
    /// [`AttentionError::AlibiSlope`] if one is NaN or infinite. Their number is checked with the other options.
    pub fn new(slopes: &[f32]) -> Result<Self, AttentionError> {
        let bad = slopes.iter().position(|slope| !slope.is_finite());
        if let Some(head) = bad {
            let slope = slopes[head];
            return Err(AttentionError::AlibiSlope { head, slope });
        }
        let bits = slopes.iter().map(|slope| slope.to_bits()).collect();
        let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
        let list = (lists.entry(bits)).or_insert_with(|| slopes.to_vec().leak());
        Ok(Self(list))
    }

    /// The paper's slopes for `q_heads` heads. If that is a power of two, they are the powers `2^(-8 n / q_heads)` for
    /// `n` from 1 to `q_heads`. Otherwise they are the slopes of the next smaller power of two, followed by every
    /// second slope of the next greater one, starting with its first, as in the paper's code.
    #[must_use]
    pub fn standard(q_heads: usize) -> Self {
        let power = 1usize << q_heads.max(1).ilog2();
        let of = |n: usize, heads: usize| (-8.0 * n as f64 / heads as f64).exp2() as f32;
        let first = (1..=power).map(|n| of(n, power));
        let more = (1..=2 * power).step_by(2).map(|n| of(n, 2 * power));
        let slopes: Vec<f32> = first.chain(more).take(q_heads).collect();
        Self::new(&slopes).expect("powers of two are finite")
    }

    /// The slopes, one per query head.
    #[must_use]
    pub fn values(self) -> &'static [f32] {
        self.0
    }
}

impl TryFrom<Vec<f32>> for AlibiSlopes {
    type Error = AttentionError;

    fn try_from(slopes: Vec<f32>) -> Result<Self, AttentionError> {
        Self::new(&slopes)
    }
}

impl From<AlibiSlopes> for Vec<f32> {
    fn from(slopes: AlibiSlopes) -> Self {
        slopes.0.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionOptions, ElementType, MaskedProblem, Problem};

    fn problem(q_heads: usize, slopes: AlibiSlopes) -> Result<Problem, AttentionError> {
        let (q, k) = ([2, q_heads, 3, 8], [2, 2, 5, 8]);
        let options = AttentionOptions::new().with_alibi(slopes);
        Problem::new(&q, &k, &k, None, ElementType::F32, &options)
    }

    #[test]
    fn standard_slopes_are_the_papers() {
        let of = |heads| AlibiSlopes::standard(heads).values();
        assert_eq!(of(0), [0.0f32; 0]);
        assert_eq!(of(1), [1.0 / 256.0]);
        assert_eq!(of(2), [1.0 / 16.0, 1.0 / 256.0]);
        let eight: Vec<f32> = (1..=8).map(|n| 0.5f32.powi(n)).collect();
        assert_eq!(of(8), eight);
        assert_eq!(of(16)[..2], [0.5f32.sqrt(), 0.5]);
        // 8 of 8 heads, then every second of 16, starting with the first.
        let twelve: Vec<f32> = (eight.iter())
            .chain(of(16).iter().step_by(2).take(4))
            .copied()
            .collect();
        assert_eq!(of(12), twelve);
        assert_eq!(of(3), [of(2), &of(4)[..1]].concat());
    }

    #[test]
    fn equal_slopes_share_their_memory() {
        let a = AlibiSlopes::new(&[0.25, -3.0]).unwrap();
        let b = AlibiSlopes::new(&[0.25, -3.0]).unwrap();
        assert_eq!(a.values().as_ptr(), b.values().as_ptr());
        assert_ne!(a, AlibiSlopes::new(&[0.25, 3.0]).unwrap());
    }

    #[test]
    fn the_last_query_stands_at_the_last_key() {
        let p = problem(2, AlibiSlopes::standard(2)).unwrap();
        assert_eq!([0, 2, 4].map(|key| p.distance(0, key)), [2, 0, 2]);
        assert_eq!([0, 2, 4].map(|key| p.distance(2, key)), [4, 2, 0]);
        assert_eq!(p.slope(1), Some(1.0 / 256.0));
    }

    #[test]
    fn slopes_that_are_not_finite_or_of_other_heads_are_refused() {
        let error = AlibiSlopes::new(&[1.0, f32::NAN]).unwrap_err();
        assert!(matches!(error, AttentionError::AlibiSlope { head: 1, .. }));
        let error = AlibiSlopes::new(&[f32::INFINITY]).unwrap_err();
        let text = "the ALiBi slope of head 0 must be finite, but is inf";
        assert_eq!(error.to_string(), text);
        let error = problem(4, AlibiSlopes::standard(2)).unwrap_err();
        let text = "there are 2 ALiBi slopes for 4 query heads";
        assert_eq!(error.to_string(), text);
        let (q, k) = ([2, 4, 3, 8], [2, 2, 5, 8]);
        let options = AttentionOptions::new().with_alibi(AlibiSlopes::standard(0));
        let masked = MaskedProblem::new(&q, &k, &k, None, None, ElementType::F32, &options);
        let (slopes, q_heads) = (0, 4);
        let refused = AttentionError::AlibiHeads { slopes, q_heads };
        assert_eq!(masked.unwrap_err(), refused);
    }
}

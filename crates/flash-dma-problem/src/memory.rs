//! The memory that a problem takes, and the largest problem that fits a given memory.
//!
//! The tensors of a call follow from its shapes; only the engine knows its additional memory. Each engine has its own
//! `required_bytes`, and searches with [`longest`] and [`largest_batch`].

use crate::{AttentionError, AttentionOptions, Problem, cost};

/// The passes that memory is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Passes {
    /// The selection and the forward pass.
    Forward,
    /// The selection, forward and backward pass, with everything that is read and written held at once.
    ForwardAndBackward,
    /// [`Passes::ForwardAndBackward`] for keys that are [selected](Problem::has_scores) with runners-up: also the ends
    /// of the runners-up, and the gradient of the rank.
    WithRunnersUp,
}

/// The greatest size that a search tries.
const MOST: usize = i32::MAX as usize;

/// Bytes of a problem's tensors: inputs, scores, intervals, `out`, `lse` and its rounding error, and with a backward
/// pass the gradients of `out` and of the inputs and, in 16 bits, the [residual](Problem::residual_shape) of `out`.
///
/// Between passes, autodiff keeps the tensors of [`Passes::Forward`], the residual, and with runners-up one word per
/// key.
#[must_use]
pub fn tensor_bytes(problem: &Problem, passes: Passes) -> u128 {
    match passes {
        Passes::Forward => cost::forward_bytes(problem),
        Passes::ForwardAndBackward => {
            let residual = (problem.residual_shape()).map_or(0, |shape| cost::count(&shape));
            cost::backward_bytes(problem) + residual * problem.element.size() as u128
        }
        Passes::WithRunnersUp => {
            // The ends of the runners-up and the gradient of the rank: one word each per key.
            let keys = u128::from(problem.has_scores) * cost::count(&problem.scores_shape());
            tensor_bytes(problem, Passes::ForwardAndBackward) + 8 * keys
        }
    }
}

/// The most tokens per sequence that fit into `bytes`, with as many queries as keys. 0 if not even one fits.
///
/// `required` computes the bytes of a problem; one that is [too large](AttentionError::TooLarge) does not fit. The
/// result fits, and one token more does not. Where `required` does not grow with every token, as an engine's workspace
/// may not, some greater length may fit again.
///
/// # Errors
///
/// Any other error of `required`.
pub fn longest(
    problem: &Problem,
    bytes: usize,
    required: impl Fn(&Problem) -> Result<usize, AttentionError>,
) -> Result<usize, AttentionError> {
    greatest(|len| fits(problem, [problem.batch, len, len], bytes, &required))
}

/// The greatest number of sequences that fits into `bytes`, each as long as the problem's. 0 if not even one fits.
///
/// `required` and the result are as in [`longest`].
///
/// # Errors
///
/// The errors of [`longest`].
pub fn largest_batch(
    problem: &Problem,
    bytes: usize,
    required: impl Fn(&Problem) -> Result<usize, AttentionError>,
) -> Result<usize, AttentionError> {
    let [q_len, k_len] = [problem.q_len, problem.k_len];
    greatest(|batch| fits(problem, [batch, q_len, k_len], bytes, &required))
}

/// True if the problem with this batch, these queries and these keys takes at most `bytes`.
fn fits(
    problem: &Problem,
    sizes: [usize; 3],
    bytes: usize,
    required: impl Fn(&Problem) -> Result<usize, AttentionError>,
) -> Result<bool, AttentionError> {
    let problem = match problem.with_sizes(sizes) {
        // If the tensors alone are too large, the engine's requirement is not computed.
        Ok(problem) if tensor_bytes(&problem, Passes::Forward) > bytes as u128 => return Ok(false),
        other => other,
    };
    match problem.and_then(|problem| required(&problem)) {
        Ok(required) => Ok(required <= bytes),
        Err(AttentionError::TooLarge { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The greatest number from 0 to [`MOST`] such that it fits and its successor does not or is beyond.
fn greatest(fits: impl Fn(usize) -> Result<bool, AttentionError>) -> Result<usize, AttentionError> {
    let (mut most, mut too_many) = (0, 1);
    while too_many <= MOST && fits(too_many)? {
        (most, too_many) = (too_many, (2 * too_many).min(MOST + 1).max(too_many + 1));
    }
    while too_many - most > 1 {
        let middle = most + (too_many - most) / 2;
        if fits(middle)? {
            most = middle;
        } else {
            too_many = middle;
        }
    }
    Ok(most)
}

impl Problem {
    /// The same problem with other sizes: `[batch, q_len, k_len]`.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TooLarge`], as from [`Problem::new`].
    pub fn with_sizes(&self, [batch, q_len, k_len]: [usize; 3]) -> Result<Self, AttentionError> {
        let options = AttentionOptions {
            keep_window: (self.window < usize::MAX).then_some(self.window),
            causal: self.causal,
            scale: Some(self.scale),
            softcap: self.softcap,
            alibi: self.alibi,
            deterministic: self.deterministic,
            dropout: self.dropout,
            engine: self.engine,
        };
        let q = [batch, self.q_heads, q_len, self.head_dim];
        let kv = [batch, self.kv_heads, k_len, self.head_dim];
        let scores = self.has_scores.then_some(&kv[..3]);
        Self::new(&q, &kv, &kv, scores, self.element, &options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlibiSlopes, Dropout, ElementType, Engine, EngineChoice};

    fn problem() -> Problem {
        problem_of(ElementType::Bf16)
    }

    fn problem_of(element: ElementType) -> Problem {
        let (q, k) = ([2, 4, 100, 64], [2, 2, 300, 64]);
        let options = AttentionOptions::new()
            .with_keep_window(7)
            .with_softcap(3.0);
        Problem::new(&q, &k, &k, Some(&k[..3]), element, &options).unwrap()
    }

    fn tensors(problem: &Problem) -> Result<usize, AttentionError> {
        Ok(tensor_bytes(problem, Passes::ForwardAndBackward) as usize)
    }

    #[test]
    fn the_tensors_of_both_passes_are_what_their_shapes_say() {
        let (q, kv, keys, rows) = (2 * 4 * 100 * 64, 2 * 2 * 300 * 64, 2 * 2 * 300, 2 * 4 * 100);
        let forward = 2 * (2 * q + 2 * kv) + 4 * keys + 8 * keys + 8 * rows;
        let problem = problem();
        assert_eq!(tensor_bytes(&problem, Passes::Forward), forward);
        let gradients = 2 * (2 * q + 2 * kv) + 4 * keys;
        let residual = 2 * q;
        let both = tensor_bytes(&problem, Passes::ForwardAndBackward);
        assert_eq!(both, forward + gradients + residual);
        let ranked = tensor_bytes(&problem, Passes::WithRunnersUp);
        assert_eq!(ranked, both + 4 * keys + 4 * keys);
        // f32 has no residual.
        let wide = problem_of(ElementType::F32);
        let gradients = 4 * (2 * q + 2 * kv) + 4 * keys;
        let both = tensor_bytes(&wide, Passes::ForwardAndBackward);
        assert_eq!(both, tensor_bytes(&wide, Passes::Forward) + gradients);
    }

    #[test]
    fn what_is_found_fits_and_one_more_does_not() {
        let problem = problem();
        for bytes in [1, 10_000, 123_457, 1 << 20, 3 << 33] {
            let len = longest(&problem, bytes, tensors).unwrap();
            let of = |len| tensors(&problem.with_sizes([2, len, len]).unwrap()).unwrap();
            assert!(of(len) <= bytes && of(len + 1) > bytes, "{len} of {bytes}");
            let batch = largest_batch(&problem, bytes, tensors).unwrap();
            let of = |batch| tensors(&problem.with_sizes([batch, 100, 300]).unwrap()).unwrap();
            assert!(
                of(batch) <= bytes && of(batch + 1) > bytes,
                "{batch} of {bytes}"
            );
        }
    }

    #[test]
    fn other_sizes_change_nothing_else() {
        let problem = problem();
        assert_eq!(problem.with_sizes([2, 100, 300]), Ok(problem));
        let other = problem.with_sizes([1, 5, 6]).unwrap();
        assert_eq!((other.batch, other.q_len, other.k_len), (1, 5, 6));
        assert_eq!((other.window, other.softcap), (7, Some(3.0)));

        let (q, k) = ([2, 4, 100, 64], [2, 2, 300, 64]);
        let options = AttentionOptions::new()
            .with_causal(false)
            .with_scale(0.5)
            .with_alibi(AlibiSlopes::standard(4))
            .with_deterministic(true)
            .with_dropout(Dropout::new(0.25, 3).unwrap())
            .with_engine(EngineChoice::Only(Engine::Cpu));
        let problem = Problem::new(&q, &k, &k, None, ElementType::F16, &options).unwrap();
        assert_eq!(problem.with_sizes([2, 100, 300]), Ok(problem));
    }

    #[test]
    fn what_is_too_large_for_an_engine_does_not_fit_and_other_errors_surface() {
        let limited = |problem: &Problem| match problem.k_len {
            0..=1000 => Ok(0),
            size => Err(AttentionError::TooLarge {
                what: "keys",
                size,
                limit: 1000,
            }),
        };
        assert_eq!(longest(&problem(), usize::MAX, limited), Ok(1000));
        let refused = |_: &Problem| Err(AttentionError::ZeroWindow);
        let error = longest(&problem(), usize::MAX, refused).unwrap_err();
        assert_eq!(error, AttentionError::ZeroWindow);
    }

    #[test]
    fn a_search_without_bounds_ends_at_what_positions_reach() {
        assert_eq!(greatest(|_| Ok(true)), Ok(MOST));
        assert_eq!(greatest(|n| Ok(n < MOST)), Ok(MOST - 1));
        assert_eq!(greatest(|_| Ok(false)), Ok(0));
    }
}

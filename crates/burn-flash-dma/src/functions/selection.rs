//! The selection: from scores to the interval of queries that attends to each key.

use crate::ops::attention::DynamicMaskOps;
use crate::validate::{expect, same_device, scores_as_f32};
use burn::backend::Dispatch;
use burn::tensor::{Device, Int, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, Problem, TensorName, TensorSpec};

/// The positions of the queries that attend to each key: the selection that [`select`] makes from scores.
///
/// A query's position is the index of the last key it may see, so one selection serves causal and
/// full attention, any number of queries, and any tensors with as many keys (see
/// [`Interval`](crate::Interval)). It is a constant to autodiff.
#[derive(Clone, Debug)]
pub struct Intervals {
    tensor: Tensor<4, Int>,
    far: Option<Tensor<3, Int>>,
    window: usize,
}

impl Intervals {
    /// The intervals, `[batch, kv_heads, k_len, 2]` i32: first position and one past the last.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<4, Int> {
        &self.tensor
    }

    /// The same as [`tensor`](Self::tensor), by value.
    #[must_use]
    pub fn into_tensor(self) -> Tensor<4, Int> {
        self.tensor
    }

    /// One past the last position at which each key is a runner-up, `[batch, kv_heads, k_len]` i32; it is one from the
    /// end of its interval on. `None` without runners-up.
    #[must_use]
    pub fn far(&self) -> Option<&Tensor<3, Int>> {
        self.far.as_ref()
    }

    /// Intervals and the ends of runners-up, as the operations take them.
    pub(crate) fn into_parts(self) -> (Tensor<4, Int>, Option<Tensor<3, Int>>) {
        (self.tensor, self.far)
    }

    /// How many keys each query keeps.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    /// These intervals with runners-up, each from the end of its interval to `far`, `[batch, kv_heads, k_len]` i32.
    #[cfg(test)]
    pub(crate) fn with_far(self, far: Tensor<3, Int>) -> Self {
        Self {
            far: Some(far),
            ..self
        }
    }

    /// The options with this window, if they do not ask for another one.
    pub(crate) fn resolve_window(
        &self,
        options: AttentionOptions,
    ) -> Result<AttentionOptions, AttentionError> {
        match options.keep_window {
            Some(window) if window != self.window => Err(AttentionError::IntervalsWindow {
                intervals: self.window,
                options: window,
            }),
            _ => Ok(options.with_keep_window(self.window)),
        }
    }

    pub(crate) fn check(&self, problem: &Problem, device: &Device) -> Result<(), AttentionError> {
        let shape = self.tensor.dims();
        let spec = TensorSpec {
            name: TensorName::Intervals,
            shape: &shape,
            // The engine checks the strides.
            strides: &[1; 4],
        };
        spec.check(&problem.intervals_shape())?;
        same_device(device, TensorName::Intervals, self.tensor.device())?;
        let Some(far) = &self.far else {
            return Ok(());
        };
        let spec = TensorSpec {
            name: TensorName::Far,
            shape: &far.dims(),
            strides: &[1; 3],
        };
        spec.check(&problem.scores_shape())?;
        same_device(device, TensorName::Far, far.device())
    }
}

/// Selects the `window` highest scored visible keys of each query, as one interval per key.
///
/// `scores` is `[batch, kv_heads, k_len]`, f32 (f16 and bf16 are cast up). Exact for any window:
/// the greater score first, then the lower index; NaN below every number; −∞ never. `window >=
/// k_len` keeps every key.
///
/// # Panics
///
/// If [`try_select`] returns an error, with that error's text.
#[must_use]
pub fn select(scores: Tensor<3>, window: usize) -> Intervals {
    expect(try_select(scores, window))
}

/// Like [`select`], but returns the error.
///
/// # Errors
///
/// [`AttentionError::ZeroWindow`], [`AttentionError::ElementType`] or [`AttentionError::TooLarge`].
pub fn try_select(scores: Tensor<3>, window: usize) -> Result<Intervals, AttentionError> {
    if window == 0 {
        return Err(AttentionError::ZeroWindow);
    }
    let scores = scores_as_f32(scores)?;
    let [_, _, len] = scores.dims();
    let limit = i32::MAX as usize;
    if len > limit {
        return Err(AttentionError::TooLarge {
            what: "the number of keys",
            size: len,
            limit,
        });
    }
    let intervals = Dispatch::dynamic_mask_select(scores.into_dispatch(), window);
    Ok(Intervals {
        tensor: Tensor::from_dispatch(intervals),
        far: None,
        window,
    })
}

#[cfg(all(test, feature = "flex", feature = "autodiff"))]
mod tests {
    use super::*;
    use crate::Attention;

    /// Attention to two keys per query, with two runners-up if asked for: the gradient of the scores.
    fn run(runners_up: bool, far_keys: usize) -> Result<Vec<f32>, AttentionError> {
        let device = Device::flex().autodiff();
        let rows = |heads: usize, step: f32| {
            let all = Tensor::<1, Int>::arange(0..(heads * 72) as i64, &device).float();
            (all * step).sin().reshape([1, heads, 9, 8])
        };
        let (q, k, v) = (rows(2, 0.7), rows(1, 1.3), rows(1, 2.9));
        // The first two keys stay, the next two are runners-up from their own positions on.
        let scores = (0..9).map(|n| -(n as f32)).collect::<Vec<_>>();
        let scores = Tensor::<1>::from_floats(&scores[..], &device).reshape([1, 1, 9]);
        let scores = scores.require_grad();
        let mut intervals = select(scores.clone(), 2);
        assert!(intervals.far().is_none());
        if runners_up {
            let far = select(scores.clone(), 4).into_tensor().narrow(3, 1, 1);
            intervals = intervals.with_far(far.reshape([1, 1, 9]).narrow(2, 0, far_keys));
        }
        let attention = Attention::new(q, k, v).scores(scores.clone());
        let out = attention.intervals(&intervals).try_forward()?;
        let grads = out.powi_scalar(2).sum().backward();
        let grad = scores.grad(&grads).expect("scores are tracked");
        Ok(grad.into_data().iter::<f32>().collect())
    }

    #[test]
    fn runners_up_add_to_the_gradient_of_the_scores() {
        let (without, with) = (run(false, 9).unwrap(), run(true, 9).unwrap());
        assert_eq!(with[..2], without[..2]);
        assert_eq!(without[2..], [0.0; 7]);
        assert!(with[2..4].iter().all(|&x| x != 0.0), "{with:?}");
        assert_eq!(with[4..], [0.0; 5]);
    }

    #[test]
    fn ends_of_other_keys_are_refused() {
        let error = run(true, 8).unwrap_err();
        assert!(
            error.to_string().contains("the ends of the runners-up"),
            "{error}"
        );
        assert_eq!(error.kind(), "Shape");
    }
}

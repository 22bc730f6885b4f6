//! The selection: for each key the interval of positions that attend to it.

use crate::documents::Documents;
use crate::fallback::running::arange;
use crate::fallback::tensors::ints;
use crate::validate::{check_len, check_shape, same_device};
use burn::tensor::{DType, Device, Int, Tensor};
use flash_dma_problem::tensors::RankLearning;
use flash_dma_problem::{AttentionError, AttentionOptions, Problem, TensorName};

/// A selection: the interval of positions that attend to each key.
///
/// Made from scores by [`select`](crate::select()) and [`Selector`](crate::Selector), without scores by
/// [`sliding_window`], and by [`try_from_tensor`](Self::try_from_tensor) from anything that can be written as one
/// interval per key.
///
/// A query's position is the index of the last key it may see, so one selection serves causal and full attention, any
/// number of queries, and any tensors with as many keys (see [`Interval`](crate::Interval)). Only recent keys, sinks
/// and documents need causal masking, and documents as many queries as keys. It is a constant to autodiff.
#[derive(Clone, Debug)]
pub struct Intervals {
    tensor: Tensor<4, Int>,
    learning: Option<LearningRank>,
    max_live: usize,
    origin: Origin,
}

/// A tensor that ranks the keys and learns.
#[derive(Clone, Debug)]
pub(crate) struct LearningRank {
    /// f32, and tracked by autodiff, which gives it the gradient.
    pub(crate) rank: Tensor<3>,
    /// The pairs by which it learns.
    pub(crate) pairs: RankLearning<Tensor<3, Int>>,
    /// Present if the ranks of a head compete: the share of each key in the gradient that is charged to all of them, f32,
    /// the keys in parts, `[batch, kv_heads, parts, keys]`.
    pub(crate) shares: Option<Tensor<4>>,
}

/// Parts of the rule that made the intervals; empty for a plain selection and for given intervals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    pub(crate) recent: usize,
    pub(crate) sinks: usize,
    pub(crate) documents: Option<Documents>,
}

impl Intervals {
    /// Intervals of an engine, `[batch, kv_heads, k_len, 2]` i32, at most `max_live` of which hold any one position.
    pub(crate) fn new(
        tensor: Tensor<4, Int>,
        learning: Option<LearningRank>,
        max_live: usize,
        origin: Origin,
    ) -> Self {
        Self {
            tensor,
            learning,
            max_live,
            origin,
        }
    }

    /// Intervals made elsewhere, `[batch, kv_heads, k_len, 2]` of any integer type: the first position, which is the
    /// key's own index, and one past the last, from the index (never attended) to `k_len`. Reads the tensor to the
    /// host, once.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Shape`] if the last axis does not have size 2, [`AttentionError::IntervalBounds`],
    /// [`AttentionError::TooLarge`], or [`AttentionError::DeviceFailed`] if reading the tensor fails.
    pub fn try_from_tensor(tensor: Tensor<4, Int>) -> Result<Self, AttentionError> {
        let shape @ [batch, heads, k_len, _] = tensor.dims();
        check_shape(TensorName::Intervals, &shape, &[batch, heads, k_len, 2])?;
        check_len(k_len)?;
        let data = (tensor.clone().try_into_data_as::<i64>()).map_err(|error| {
            AttentionError::DeviceFailed {
                operation: "reading the intervals",
                reason: error.to_string(),
            }
        })?;
        let words: Vec<i64> = data.iter::<i64>().collect();
        let mut max_live = 1;
        for row in words.chunks_exact((2 * k_len).max(1)) {
            max_live = max_live.max(most_alive(row)?);
        }
        let tensor = match tensor.dtype() {
            DType::I32 => tensor,
            _ => tensor.cast(DType::I32),
        };
        Ok(Self::new(tensor, None, max_live, Origin::default()))
    }

    /// [`try_from_tensor`](Self::try_from_tensor) with only the ends, one past the last position of each key,
    /// `[batch, kv_heads, k_len]`.
    ///
    /// # Errors
    ///
    /// See [`try_from_tensor`](Self::try_from_tensor).
    pub fn try_from_ends(ends: Tensor<3, Int>) -> Result<Self, AttentionError> {
        let [batch, heads, k_len] = ends.dims();
        let options = (&ends.device(), ends.dtype());
        if batch * heads * k_len == 0 {
            return Self::try_from_tensor(Tensor::zeros([batch, heads, k_len, 2], options));
        }
        let keys = arange(0..k_len as i64, options);
        let keys = keys.reshape([1, 1, k_len, 1]);
        let keys = keys.expand([batch, heads, k_len, 1]);
        Self::try_from_tensor(Tensor::cat(vec![keys, ends.unsqueeze_dim(3)], 3))
    }

    /// The intervals, `[batch, kv_heads, k_len, 2]` i32: first position and one past the last.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<4, Int> {
        &self.tensor
    }

    /// [`tensor`](Self::tensor) by value.
    #[must_use]
    pub fn into_tensor(self) -> Tensor<4, Int> {
        self.tensor
    }

    /// This selection as a constant: without runners-up, whose rank has a graph.
    #[cfg(feature = "train")]
    pub(crate) fn without_autodiff(self) -> Self {
        Self {
            tensor: self.tensor.without_autodiff(),
            learning: None,
            ..self
        }
    }

    /// This selection with another tensor that ranks the runners-up, if there are any.
    pub(crate) fn ranked_by(self, rank: &Tensor<3>) -> Self {
        let learning = self.learning.map(|learning| LearningRank {
            rank: rank.clone(),
            ..learning
        });
        Self { learning, ..self }
    }

    /// This selection for queries that are the last of as many positions as there are keys: a document's end is in its intervals,
    /// so nothing depends on how many queries there are.
    #[cfg(feature = "autodiff")]
    pub(crate) fn for_last_queries(mut self) -> Self {
        self.origin.documents = None;
        self
    }

    /// The intervals, and the tensor that ranks the keys if it learns.
    pub(crate) fn into_parts(self) -> (Tensor<4, Int>, Option<LearningRank>) {
        (self.tensor, self.learning)
    }

    /// One past the last position at which each key is attended or a runner-up, `[batch, kv_heads, k_len]` i32, never
    /// before the end of its interval. Present if autodiff tracks the scores and the selector has
    /// [runners-up](crate::Selector::runners_up) or [kept keys that learn](crate::Selector::leave_one_out).
    #[must_use]
    pub fn runner_up_ends(&self) -> Option<&Tensor<3, Int>> {
        (self.learning.as_ref()).map(|learning| &learning.pairs.ends)
    }

    /// Most keys of a head that one position attends to: the selector's window (the largest, if heads differ), or the
    /// count in given intervals, at least 1.
    #[must_use]
    pub fn max_live(&self) -> usize {
        self.max_live
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The options with this window, unless they ask for another one.
    pub(crate) fn resolve_window(
        &self,
        options: AttentionOptions,
    ) -> Result<AttentionOptions, AttentionError> {
        match options.keep_window {
            Some(window) if window != self.max_live => Err(AttentionError::IntervalsWindow {
                intervals: self.max_live,
                options: window,
            }),
            _ => Ok(options.with_keep_window(self.max_live)),
        }
    }

    pub(crate) fn check(&self, problem: &Problem, device: &Device) -> Result<(), AttentionError> {
        let name = TensorName::Intervals;
        check_shape(name, &self.tensor.dims(), &problem.intervals_shape())?;
        same_device(device, name, self.tensor.device())?;
        if let Some(ends) = self.runner_up_ends() {
            let name = TensorName::RunnerUpEnds;
            check_shape(name, &ends.dims(), &problem.scores_shape())?;
            same_device(device, name, ends.device())?;
        }
        self.origin.check(problem)
    }
}

impl Origin {
    pub(crate) fn sinks_of(&self, sequence: usize, k_len: usize) -> Vec<bool> {
        let mut is_sink = vec![false; k_len];
        let mut mark = |start: usize, len: usize| {
            is_sink[start..start + len.min(self.sinks)].fill(true);
        };
        match &self.documents {
            None => mark(0, k_len),
            Some(documents) => {
                let own = documents.all().filter(|d| d.sequence == sequence);
                own.for_each(|d| mark(d.start, d.len));
            }
        }
        is_sink
    }

    /// Begin and end of the documents of a sequence, without padding; the whole sequence if it has none.
    pub(crate) fn spans_of(&self, sequence: usize, k_len: usize) -> Vec<(usize, usize)> {
        let Some(documents) = &self.documents else {
            return vec![(0, k_len)];
        };
        let own = documents
            .all()
            .filter(|d| d.sequence == sequence && !d.is_padding);
        own.map(|d| (d.start, d.start + d.len)).collect()
    }

    /// Refuses calls that number positions differently from the rule.
    fn check(&self, problem: &Problem) -> Result<(), AttentionError> {
        let by_position = self.recent > 0 || self.sinks > 0 || self.documents.is_some();
        if by_position && !problem.causal {
            return Err(AttentionError::SelectionNotCausal);
        }
        if self.documents.is_some() && problem.q_len != problem.k_len {
            return Err(AttentionError::DocumentQueries {
                q_len: problem.q_len,
                k_len: problem.k_len,
            });
        }
        Ok(())
    }
}

/// Most keys alive at one position, from checked first positions and ends of a head.
fn most_alive(row: &[i64]) -> Result<usize, AttentionError> {
    let k_len = row.len() / 2;
    let mut deaths = vec![0usize; k_len + 1];
    for (key, pair) in row.chunks_exact(2).enumerate() {
        let (first, end) = (pair[0], pair[1]);
        if first != key as i64 || !(first..=k_len as i64).contains(&end) {
            return Err(AttentionError::IntervalBounds {
                key,
                first,
                end,
                k_len,
            });
        }
        deaths[end as usize] += 1;
    }
    let (mut most, mut alive) = (0, 0);
    for dead in &deaths[..k_len] {
        // The key of this position is born; if it is never attended, it is among the dead.
        alive = alive + 1 - dead;
        most = most.max(alive);
    }
    Ok(most)
}

twin! {
    /// The selection of the last `window` keys at each position, for scores of `shape` `[batch, kv_heads, k_len]`. No
    /// scores are read, so no key is hidden. To hide keys or keep sinks, use
    /// [`Selector::recent`](crate::Selector::recent).
    pub fn sliding_window(shape: [usize; 3], window: usize, device: &Device) -> Intervals
        = try_sliding_window;
}

/// Like [`sliding_window`], but returns the error.
///
/// # Errors
///
/// [`AttentionError::ZeroWindow`] or [`AttentionError::TooLarge`].
pub fn try_sliding_window(
    shape: [usize; 3],
    window: usize,
    device: &Device,
) -> Result<Intervals, AttentionError> {
    if window == 0 {
        return Err(AttentionError::ZeroWindow);
    }
    let [batch, heads, k_len] = shape;
    check_len(k_len)?;
    let pairs = (0..k_len).flat_map(|j| [j as i32, k_len.min(j.saturating_add(window)) as i32]);
    let pairs = ints(pairs.collect(), [1, 1, k_len, 2], device);
    let origin = Origin {
        recent: window,
        ..Origin::default()
    };
    let tensor = pairs.repeat_dim(0, batch).repeat_dim(1, heads);
    Ok(Intervals::new(tensor, None, window, origin))
}

impl Documents {
    twin! {
        /// The selection that keeps every key of a document up to its end, for keys of `shape`
        /// `[batch, kv_heads, k_len]`: dense causal attention inside documents, in the work of the documents' own squares.
        /// See [`Attention::intervals`](crate::Attention::intervals).
        pub fn intervals(&self, shape: [usize; 3], device: &Device) -> Intervals
            = Self::try_intervals;
    }

    /// Like [`intervals`](Self::intervals), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::DocumentBatch`], [`AttentionError::DocumentTokens`] or [`AttentionError::TooLarge`].
    pub fn try_intervals(
        &self,
        shape: [usize; 3],
        device: &Device,
    ) -> Result<Intervals, AttentionError> {
        let [batch, heads, k_len] = shape;
        self.check(shape)?;
        check_len(k_len)?;
        let tensor = if shape.contains(&0) {
            Tensor::zeros([batch, heads, k_len, 2], (device, DType::I32))
        } else {
            let whole = self.whole.on(device, || {
                let pairs = self.all().flat_map(|document| {
                    let end = document.start + document.len;
                    let end_of = move |key| if document.is_padding { key } else { end };
                    (document.start..end).flat_map(move |key| [key as i32, end_of(key) as i32])
                });
                ints(pairs.collect(), [batch, 1, k_len, 2], device)
            });
            whole.repeat_dim(1, heads)
        };
        let origin = Origin {
            documents: Some(self.clone()),
            ..Origin::default()
        };
        Ok(Intervals::new(tensor, None, self.longest(), origin))
    }
}

#[cfg(all(test, feature = "flex", feature = "autodiff"))]
mod tests {
    use super::*;
    use crate::{Attention, select};

    /// Gradient of the scores in attention to two keys per query, with two runners-up if asked for.
    fn run(runners_up: bool, far_keys: usize) -> Result<Vec<f32>, AttentionError> {
        let device = Device::flex().autodiff();
        let rows = |heads: usize, step: f32| {
            let all = Tensor::<1, Int>::arange(0..(heads * 72) as i64, &device).float();
            (all * step).sin().reshape([1, heads, 9, 8])
        };
        let (q, k, v) = (rows(2, 0.7), rows(1, 1.3), rows(1, 2.9));
        // The first two keys stay; the next two are runners-up from their own positions on.
        let scores = (0..9).map(|n| -(n as f32)).collect::<Vec<_>>();
        let scores = Tensor::<1>::from_floats(&scores[..], &device).reshape([1, 1, 9]);
        let scores = scores.require_grad();
        let mut intervals = select(scores.clone(), 2);
        assert!(intervals.runner_up_ends().is_none());
        if runners_up {
            let ends = select(scores.clone(), 4).into_tensor().narrow(3, 1, 1);
            let ends = ends.reshape([1, 1, 9]).narrow(2, 0, far_keys);
            intervals.learning = Some(LearningRank {
                rank: scores.clone(),
                pairs: RankLearning {
                    ends,
                    max_live: 4,
                    kept_from: None,
                },
                shares: None,
            });
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

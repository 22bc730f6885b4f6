//! Dynamic-mask and plain attention: validation, then one dispatch.

use super::selection::{Intervals, LearningRank};
use super::selector::{charged, try_select};
use super::sink::{checked_logits, try_learnable_sink};
use super::state::{AllKeys, ScoredKeys, SelectedKeys};
use crate::engines;
use crate::ops::attention::DynamicMaskOps;
use crate::spans::span;
use crate::types::{Forwarded, RankLearning, Selection, Wanted};
use crate::validate::{is_tracked, rows_element, same_device, scores_as_f32, supported, tracked};
use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, Problem, TensorName};
use std::marker::PhantomData;

twin! {
    /// Dynamic-mask attention: every query attends to the `options.keep_window` visible keys of greatest score, and
    /// each logit gets its key's score. [`Attention`] has the formula, the shapes and the types, and more: the LSE,
    /// given intervals, and attention without scores.
    pub fn dynamic_mask_attention(
        q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: Tensor<3>, options: AttentionOptions
    ) -> Tensor<4> = try_dynamic_mask_attention;
}

/// Like [`dynamic_mask_attention`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types, devices or options do not fit; nothing is computed then.
pub fn try_dynamic_mask_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let call = Attention::<ScoredKeys> {
        rows: [q, k, v],
        scores: Some(scores),
        intervals: None,
        options,
        state: PhantomData,
    };
    let results = call.run(wanting(Wanted::Out))?;
    Ok(Tensor::from_dispatch(results.out))
}

/// A call of attention, with scores or without.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `q`, output | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
/// | `k`, `v` | `[batch, kv_heads, k_len, head_dim]` | as `q` |
/// | scores | `[batch, kv_heads, k_len]` | f32 (f16 and bf16 are cast up) |
/// | LSE | `[batch, q_heads, q_len]` | f32 |
///
/// `q_heads` is a multiple of `kv_heads`. Without scores every visible key is attended; with them the
/// `options.keep_window` keys of greatest score, and each logit gets its key's score: `out_i = sum_j
/// softmax_j(softcap(scale * q_i . k_j) + scores_j) v_j` over the selected keys `j`.
///
/// ```
/// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::{Attention, AttentionOptions, select};
///
/// let device = Device::flex().autodiff();
/// let normal = Distribution::Normal(0.0, 1.0);
/// let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device);
/// let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// let scores = Tensor::<3>::random([1, 2, 100], normal, &device).require_grad();
///
/// // One selection for two layers. The LSE is differentiable too.
/// let intervals = select(scores.clone(), 16);
/// let layer = |q| Attention::new(q, k.clone(), v.clone()).scores(scores.clone()).intervals(&intervals);
/// let hidden = layer(q).forward();
/// let (out, lse) = layer(hidden).options(AttentionOptions::new().with_softcap(20.0)).forward_with_lse();
/// assert_eq!((out.dims(), lse.dims()), ([1, 4, 100, 32], [1, 4, 100]));
/// let grads = (out.sum() + lse.sum()).backward();
/// assert!(scores.grad(&grads).is_some());
/// # }
/// ```
///
/// Ranking and bias may be two tensors: select by the first and pass the second as scores, or none. The bias gets the
/// gradient of the logits, the rank that of the [runners-up](crate::Selector::runners_up); a single tensor gets both.
///
/// Masks do not compile (use [`MaskedAttention`](crate::MaskedAttention)), nor do scores after intervals:
///
/// ```compile_fail
/// # fn late(q: burn::tensor::Tensor<4>, z: burn::tensor::Tensor<3>, intervals: &burn_flash_dma::Intervals) {
/// burn_flash_dma::Attention::new(q.clone(), q.clone(), q).intervals(intervals).scores(z);
/// # }
/// ```
///
/// Differentiable in `q`, `k`, `v` and the scores, whichever are tracked; the selection itself is a constant. Strided
/// inputs (`[batch, len, heads, head_dim]` data through a `swap_dims`) are read in place. A score of −∞ hides its key
/// (padding); a query that sees nothing gets zeros.
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct Attention<S = AllKeys> {
    pub(super) rows: [Tensor<4>; 3],
    /// Present exactly in the state `ScoredKeys`.
    pub(super) scores: Option<Tensor<3>>,
    /// Present in the state `SelectedKeys`, absent in `AllKeys`.
    pub(super) intervals: Option<Intervals>,
    options: AttentionOptions,
    state: PhantomData<S>,
}

impl Attention {
    /// Attention of `q` over `k` and `v`, with [`AttentionOptions::new`].
    pub fn new(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Self {
        Self {
            rows: [q, k, v],
            scores: None,
            intervals: None,
            options: AttentionOptions::new(),
            state: PhantomData,
        }
    }

    /// Scores of the keys, `[batch, kv_heads, k_len]`: they rank the keys and are added to their logits.
    pub fn scores(self, scores: Tensor<3>) -> Attention<ScoredKeys> {
        Attention {
            scores: Some(scores),
            ..self.state()
        }
    }

    /// A selection without scores: nothing is added to the logits. `options.keep_window` as with scores.
    pub fn intervals(self, intervals: &Intervals) -> Attention<SelectedKeys> {
        Attention {
            intervals: Some(intervals.clone()),
            ..self.state()
        }
    }
}

impl Attention<ScoredKeys> {
    /// A given selection, or one that [`select`](crate::select()) or a [`Selector`](crate::Selector) made from these
    /// or other scores; several calls may share it. `options.keep_window` must be `None` or the
    /// [`max_live`](Intervals::max_live) of the intervals. Recent keys, sinks and documents need causal masking,
    /// documents also as many queries as keys.
    pub fn intervals(mut self, intervals: &Intervals) -> Self {
        self.intervals = Some(intervals.clone());
        self
    }
}

impl<S> Attention<S> {
    /// Window, causal masking, scale, softcap and determinism. Without scores and intervals `keep_window` must be
    /// `None`.
    pub fn options(mut self, options: AttentionOptions) -> Self {
        self.options = options;
        self
    }

    twin! {
        /// The output, `[batch, q_heads, q_len, head_dim]` in the type of `q`.
        pub fn forward(self) -> Tensor<4> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types, devices or options do not fit, the intervals have another
    /// shape, device or window, or the intervals use recent keys, sinks or documents and this call numbers positions
    /// differently; nothing is computed then.
    pub fn try_forward(self) -> Result<Tensor<4>, AttentionError> {
        let results = self.run(wanting(Wanted::Out))?;
        Ok(Tensor::from_dispatch(results.out))
    }

    twin! {
        /// The output, and the LSE of the logits: `[batch, q_heads, q_len]`, f32, natural logarithm, −∞ where nothing
        /// is attended. Both are differentiable.
        pub fn forward_with_lse(self) -> (Tensor<4>, Tensor<3>) = Self::try_forward_with_lse;
    }

    /// Like [`forward_with_lse`](Self::forward_with_lse), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    pub fn try_forward_with_lse(self) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        let results = self.run(wanting(Wanted::OutAndLse))?;
        let [out, lse] = [results.out, results.lse];
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    twin! {
        /// The output and the LSE with one more logit per query head, `[q_heads]`, that has no key, see
        /// [`learnable_sink`](crate::learnable_sink()). Runners-up learn the gain they would bring with this logit in
        /// the softmax. Differentiable in all inputs.
        pub fn forward_with_sink(self, logits: Tensor<1>) -> (Tensor<4>, Tensor<3>)
            = Self::try_forward_with_sink;
    }

    /// Like [`forward_with_sink`](Self::forward_with_sink), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward) and, for the logits, of
    /// [`try_learnable_sink`](crate::try_learnable_sink()).
    pub fn try_forward_with_sink(
        self,
        logits: Tensor<1>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        let shape @ [_, heads, _, _] = self.rows[0].dims();
        if self.intervals.is_none() || shape.contains(&0) {
            // Without runners-up, all other gradients are the same.
            let (out, lse) = self.try_forward_with_lse()?;
            return try_learnable_sink(out, lse, logits);
        }
        let logits = checked_logits(logits, heads, &self.rows[0].device())?.into_dispatch();
        let (out, lse) = self.run(|q, k, v, selection, problem| {
            Dispatch::dynamic_mask_forward_with_sink(q, k, v, logits, selection, problem)
        })?;
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    /// Rounding error of the output in 16 bits, as autodiff keeps it; `None` for f32. Not differentiable.
    #[cfg(feature = "testing")]
    pub(crate) fn try_residual(self) -> Result<Option<Tensor<4>>, AttentionError> {
        let results = self.run(wanting(Wanted::Saved))?;
        Ok(results.residual.into_option().map(Tensor::from_dispatch))
    }

    pub(super) fn state<T>(self) -> Attention<T> {
        Attention {
            rows: self.rows,
            scores: self.scores,
            intervals: self.intervals,
            options: self.options,
            state: PhantomData,
        }
    }

    /// The call with its scores in f32, and its problem, after all checks. The problem has scores if the call has
    /// them or intervals.
    pub(super) fn checked(mut self) -> Result<(Self, Problem), AttentionError> {
        let mut options = self.options;
        if let Some(intervals) = &self.intervals {
            options = intervals.resolve_window(options)?;
        }
        let element = rows_element(&self.rows)?;
        let [q, k, v] = self.rows.each_ref().map(Tensor::dims);
        let scores_shape = match &self.scores {
            Some(scores) => Some(scores.dims()),
            // The engines read a score for every selected key.
            None => self.intervals.is_some().then_some([k[0], k[1], k[2]]),
        };
        let scores_shape = scores_shape.as_ref().map(<[usize; 3]>::as_slice);
        let problem = Problem::new(&q, &k, &v, scores_shape, element, &options)?;
        let device = supported(&self.rows, element)?;
        if let Some(scores) = &self.scores {
            same_device(&device, TensorName::Scores, scores.device())?;
        }
        let gradients = tracked(&self.rows) || self.scores.as_ref().is_some_and(is_tracked);
        engines::check(&problem, &device, gradients)?;
        self.scores = self.scores.map(scores_as_f32).transpose()?;
        if let Some(intervals) = &self.intervals {
            intervals.check(&problem, &device)?;
        }
        Ok((self, problem))
    }

    /// Runs an operation, selecting first unless there are intervals.
    fn run<R>(
        self,
        operation: impl FnOnce(Rows, Rows, Rows, Selection<Dispatch>, Problem) -> R,
    ) -> Result<R, AttentionError> {
        let _span = span!("attention");
        let (call, problem) = self.checked()?;
        let selection = match (call.scores, call.intervals) {
            (None, None) => Selection::<Dispatch>::All,
            (scores, intervals) => {
                let scores = scores.unwrap_or_else(|| {
                    let device = call.rows[0].device();
                    Tensor::zeros(problem.scores_shape(), (&device, DType::F32))
                });
                let intervals = match intervals {
                    Some(intervals) => intervals,
                    None => try_select(scores.clone(), problem.window)?,
                };
                let (intervals, learning) = intervals.into_parts();
                // Runners-up mean nothing to a call without autodiff, even if the selection was made with it.
                let devices = call.rows.each_ref().map(Tensor::device);
                let autodiff = devices.iter().any(Device::is_autodiff);
                let learning = learning.filter(|_| autodiff || scores.device().is_autodiff());
                let learning = learning.map(
                    |LearningRank {
                         rank,
                         pairs,
                         shares,
                     }| {
                        let pairs = pairs.map(Tensor::into_dispatch);
                        (pairs, charged(rank, shares).into_dispatch())
                    },
                );
                Selection::Scored {
                    scores: scores.into_dispatch(),
                    intervals: intervals.into_dispatch(),
                    learning: RankLearning::from_parts(learning),
                }
            }
        };
        let [q, k, v] = call.rows.map(Tensor::into_dispatch);
        Ok(operation(q, k, v, selection, problem))
    }
}

type Rows = FloatTensor<Dispatch>;

/// The operation of a call without a sink.
fn wanting(
    wanted: Wanted,
) -> impl FnOnce(Rows, Rows, Rows, Selection<Dispatch>, Problem) -> Forwarded<Dispatch> {
    move |q, k, v, selection, problem| {
        Dispatch::dynamic_mask_forward(q, k, v, selection, problem, wanted)
    }
}

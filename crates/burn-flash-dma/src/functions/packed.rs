//! Attention over documents packed one after another, without a batch.

use super::attention::Attention;
use super::masked::MaskedAttention;
use super::selection::Intervals;
use super::selector::Selector;
use super::state::{AllKeys, Masked, ScoredKeys, Unscored};
use crate::documents::Documents;
use crate::fallback::tensors::unless_empty;
use crate::mask::plan::TilePlan;
use crate::mask::polarity::AttentionMask;
use crate::mask::ranges::KeyRanges;
use crate::validate::{rows_element, same_device};
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, AttentionOptions, MaskedProblem, TensorName};
use std::marker::PhantomData;

/// A call of attention over packed documents, in the layout of FlashAttention's `varlen` functions: tokens first, and
/// no token attends to another document.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `q`, output | `[total_q, q_heads, head_dim]` | f32, f16 or bf16 |
/// | `k`, `v` | `[total_k, kv_heads, head_dim]` | as `q` |
/// | scores | `[total_k, kv_heads]` | f32 (f16 and bf16 are cast up) |
/// | LSE | `[q_heads, total_q]` | f32 |
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::{AttentionOptions, Documents, PackedAttention};
///
/// let device = Device::flex();
/// let rows = |tokens, heads| {
///     Tensor::<3>::random([tokens, heads, 32], Distribution::Normal(0.0, 1.0), &device)
/// };
/// let (q, k, v) = (rows(100, 4), rows(100, 2), rows(100, 2));
/// let scores = Tensor::<2>::random([100, 2], Distribution::Default, &device);
/// let documents = Documents::try_from_cu_seqlens(&[0, 30, 30, 100])?;
///
/// // Dense, and with the 16 best keys of each document.
/// let dense = PackedAttention::new(q.clone(), k.clone(), v.clone(), &documents).forward();
/// let sparse = PackedAttention::new(q, k.clone(), v.clone(), &documents).scores(scores);
/// let sparse = sparse.options(AttentionOptions::new().with_keep_window(16));
/// let (out, lse) = sparse.forward_with_lse();
/// assert_eq!((dense.dims(), out.dims(), lse.dims()), ([100, 4, 32], [100, 4, 32], [4, 100]));
///
/// // With fewer queries than keys: 3 queries over the 30 keys of the first document, and so on.
/// let queries = Documents::try_from_cu_seqlens(&[0, 3, 3, 10])?;
/// let few = PackedAttention::new(rows(10, 4), k, v, &documents).query_documents(&queries);
/// assert_eq!(few.forward().dims(), [10, 4, 32]);
/// # }
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// The call determines the kernels, one launch for all documents:
///
/// - scores, or causal self-attention without: the kernels of [`Attention`] over one interval per key, in O(Σ nᵢ · w)
///   or O(Σ nᵢ²) work and O(total) memory. Scores need causal masking and as many queries as keys per document;
/// - a mask, a bias, different numbers of queries and keys, or no causal masking: [`MaskedAttention`] over
///   [`KeyRanges::packed`], which skips the blocks between documents but reads `total_q · total_k` bits. Causal
///   masking is aligned bottom-right in each document; a query before its first key sees nothing and gets zeros.
///
/// Batches padded to one length keep [`Attention`]'s layout: pass their documents to [`Documents::intervals`],
/// [`Selector::documents`] or [`KeyRanges::packed`].
///
/// Scores with another number of queries do not compile, nor do masks together with scores:
///
/// ```compile_fail
/// # use burn_flash_dma::{Documents, PackedAttention};
/// # use burn::tensor::Tensor;
/// # fn other_queries(q: Tensor<3>, z: Tensor<2>, d: &Documents) {
/// PackedAttention::new(q.clone(), q.clone(), q, d).query_documents(d).scores(z);
/// # }
/// ```
///
/// Differentiable in `q`, `k`, `v`, the scores and the bias, whichever are tracked. An empty document changes nothing.
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct PackedAttention<S = AllKeys> {
    rows: [Tensor<3>; 3],
    queries: Documents,
    keys: Documents,
    /// Present exactly in the state `ScoredKeys`.
    scores: Option<Tensor<2>>,
    chosen: Chosen,
    /// Both absent unless the state is `Masked`.
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
    state: PhantomData<S>,
}

/// How the keys of a call with scores are selected.
// There is one per call, moved a few times.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
enum Chosen {
    /// The window of the options.
    Window,
    Rule(Selector),
    Given(Intervals),
}

impl PackedAttention {
    /// Self-attention of `q` over `k` and `v` inside the documents of one sequence, with [`AttentionOptions::new`].
    pub fn new(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents) -> Self {
        Self {
            rows: [q, k, v],
            queries: documents.clone(),
            keys: documents.clone(),
            scores: None,
            chosen: Chosen::Window,
            mask: None,
            bias: None,
            options: AttentionOptions::new(),
            state: PhantomData,
        }
    }

    /// Scores of the keys, `[total_k, kv_heads]`: they rank the keys of each document and are added to their logits.
    pub fn scores(self, scores: Tensor<2>) -> PackedAttention<ScoredKeys> {
        PackedAttention {
            scores: Some(scores),
            ..self.state()
        }
    }
}

impl PackedAttention<ScoredKeys> {
    /// Selection rule that replaces the window of the options, which must be `None` or the rule's. The documents are
    /// those of the call.
    pub fn selector(mut self, selector: Selector) -> Self {
        self.chosen = Chosen::Rule(selector);
        self
    }

    /// A given selection for keys `[1, kv_heads, total_k]`; several calls may share one. Its documents are not
    /// compared with those of the call.
    pub fn intervals(mut self, intervals: &Intervals) -> Self {
        self.chosen = Chosen::Given(intervals.clone());
        self
    }
}

impl<S: Unscored> PackedAttention<S> {
    /// Documents of the queries, if their lengths differ from those of the keys: as many, in the same order.
    pub fn query_documents(self, documents: &Documents) -> PackedAttention<Masked> {
        PackedAttention {
            queries: documents.clone(),
            ..self.state()
        }
    }

    /// Which keys each query sees inside its document: `[1, q_heads | kv_heads | 1, total_q | 1, total_k | 1]`. It is
    /// expanded to O(total_q · total_k) elements.
    pub fn mask(self, mask: impl Into<Option<AttentionMask>>) -> PackedAttention<Masked> {
        PackedAttention {
            mask: mask.into(),
            ..self.state()
        }
    }

    /// Bias added to the logits, `[1, q_heads | kv_heads | 1, total_q | 1, total_k | 1]`.
    pub fn bias(self, bias: impl Into<Option<Tensor<4>>>) -> PackedAttention<Masked> {
        PackedAttention {
            bias: bias.into(),
            ..self.state()
        }
    }
}

impl<S> PackedAttention<S> {
    /// Window, causal masking, scale, softcap and determinism. Without scores `keep_window` must be `None`.
    pub fn options(mut self, options: AttentionOptions) -> Self {
        self.options = options;
        self
    }

    twin! {
        /// The output, `[total_q, q_heads, head_dim]` in the type of `q`.
        pub fn forward(self) -> Tensor<3> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the documents do not add up to the tokens, or queries and keys have different numbers of
    /// documents; and those of [`Attention::try_forward`], [`Selector::try_select`] and
    /// [`MaskedAttention::try_forward`].
    pub fn try_forward(self) -> Result<Tensor<3>, AttentionError> {
        let out = match self.call()? {
            Call::Attention(attention) => attention.try_forward()?,
            Call::Masked(attention) => attention.try_forward()?,
        };
        Ok(tokens_first(out))
    }

    twin! {
        /// The output, and the LSE of the logits: `[q_heads, total_q]`, f32, natural logarithm, −∞ where nothing is
        /// attended. Both are differentiable.
        pub fn forward_with_lse(self) -> (Tensor<3>, Tensor<2>) = Self::try_forward_with_lse;
    }

    /// Like [`forward_with_lse`](Self::forward_with_lse), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    pub fn try_forward_with_lse(self) -> Result<(Tensor<3>, Tensor<2>), AttentionError> {
        let (out, lse) = match self.call()? {
            Call::Attention(attention) => attention.try_forward_with_lse()?,
            Call::Masked(attention) => attention.try_forward_with_lse()?,
        };
        let [_, heads, queries] = lse.dims();
        let lse = unless_empty(lse, [heads, queries], |lse| lse.squeeze_dim(0));
        Ok((tokens_first(out), lse))
    }

    fn state<T>(self) -> PackedAttention<T> {
        PackedAttention {
            rows: self.rows,
            queries: self.queries,
            keys: self.keys,
            scores: self.scores,
            chosen: self.chosen,
            mask: self.mask,
            bias: self.bias,
            options: self.options,
            state: PhantomData,
        }
    }

    pub(super) fn call(self) -> Result<Call, AttentionError> {
        let [q, k, _] = self.rows.each_ref().map(Tensor::dims);
        self.queries.check([1, q[1], q[0]])?;
        self.keys.check([1, k[1], k[0]])?;
        if self.scores.is_some() {
            return self.scored();
        }
        if self.options.keep_window.is_some() {
            return Err(AttentionError::WindowWithoutScores);
        }
        let plain = self.mask.is_none() && self.bias.is_none() && self.queries == self.keys;
        match plain && self.options.causal {
            true => self.dense(),
            false => self.masked(),
        }
    }

    fn scored(self) -> Result<Call, AttentionError> {
        let (device, mut options) = (self.rows[0].device(), self.options);
        let scores = self.scores.expect("a call with scores");
        same_device(&device, TensorName::Scores, scores.device())?;
        let [tokens, heads] = scores.dims();
        let view = |scores: Tensor<2>| scores.swap_dims(0, 1).unsqueeze_dim(0);
        let scores: Tensor<3> = unless_empty(scores, [1, heads, tokens], view);
        let intervals = match self.chosen {
            Chosen::Given(intervals) => intervals,
            Chosen::Rule(rule) => rule.documents(self.keys).try_select(scores.clone())?,
            Chosen::Window => {
                // No document keeps more keys than it has, so the kernels need no room for more.
                let window = options.keep_window.take().unwrap_or(usize::MAX);
                let rule = Selector::top(window.min(self.keys.longest()));
                rule.documents(self.keys).try_select(scores.clone())?
            }
        };
        let [q, k, v] = self.rows.map(heads_first);
        let attention = Attention::new(q, k, v).scores(scores).intervals(&intervals);
        Ok(Call::Attention(attention.options(options).state()))
    }

    fn dense(self) -> Result<Call, AttentionError> {
        let [len, heads, _] = self.rows[1].dims();
        let device = self.rows[0].device();
        let [q, k, v] = self.rows.map(heads_first);
        let attention = Attention::new(q, k, v).options(self.options);
        if self.keys.longest() == len {
            // All tokens belong to one document.
            return Ok(Call::Attention(attention.state()));
        }
        let intervals = self.keys.try_intervals([1, heads, len], &device)?;
        Ok(Call::Attention(attention.intervals(&intervals).state()))
    }

    fn masked(self) -> Result<Call, AttentionError> {
        let (device, causal) = (self.rows[0].device(), self.options.causal);
        let rows @ [q, k, v] = &self.rows.map(heads_first);
        let lengths = [q.dims()[2], k.dims()[2]];
        // The ranges mask causally, per document.
        let options = self.options.with_causal(false);
        let mask_shape = self.mask.as_ref().map(AttentionMask::dims);
        let bias_shape = self.bias.as_ref().map(Tensor::dims);
        MaskedProblem::new(
            &q.dims(),
            &k.dims(),
            &v.dims(),
            mask_shape.as_ref().map(<[usize; 4]>::as_slice),
            bias_shape.as_ref().map(<[usize; 4]>::as_slice),
            rows_element(rows)?,
            &options,
        )?;
        if let Some(mask) = &self.mask {
            same_device(&device, TensorName::Mask, mask.device())?;
        }
        let ranges = KeyRanges::try_packed([&self.queries, &self.keys], causal, &device)?;
        let plan = match self.mask {
            None => TilePlan::try_from_ranges(ranges, lengths, false)?,
            Some(mask) => {
                TilePlan::try_new(mask.and(ranges.into_mask(lengths[1])), lengths, false)?
            }
        };
        let [q, k, v] = rows.clone();
        let attention = MaskedAttention::new(q, k, v).plan(&plan).bias(self.bias);
        Ok(Call::Masked(attention.options(options)))
    }
}

/// The call that computes it.
// There is one per call, moved a few times.
#[allow(clippy::large_enum_variant)]
pub(super) enum Call {
    /// In any state.
    Attention(Attention<()>),
    Masked(MaskedAttention<Masked>),
}

/// `[tokens, heads, head_dim]` to `[1, heads, tokens, head_dim]`, a view.
fn heads_first(rows: Tensor<3>) -> Tensor<4> {
    let [tokens, heads, dim] = rows.dims();
    let view = |rows: Tensor<3>| rows.swap_dims(0, 1).unsqueeze_dim(0);
    unless_empty(rows, [1, heads, tokens, dim], view)
}

/// `[1, heads, tokens, head_dim]` to `[tokens, heads, head_dim]`, a view.
fn tokens_first(rows: Tensor<4>) -> Tensor<3> {
    let [_, heads, tokens, dim] = rows.dims();
    let view = |rows: Tensor<4>| rows.squeeze_dim::<3>(0).swap_dims(0, 1);
    unless_empty(rows, [tokens, heads, dim], view)
}

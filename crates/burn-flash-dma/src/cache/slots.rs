//! The cache of constant size.

use super::chunk::forward_problem;
use super::config::DynamicMaskCacheConfig;
use super::hold::{Hold, holds};
use super::tokens::{Rows, check_support, plain};
use crate::functions::composition::compose;
use crate::ops::attention::DynamicMaskOps;
use crate::ops::cache::CacheOps;
use crate::types::{ChunkKeys, OptionalFloat, RankLearning, Selection, SlotTensors, Wanted};
use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Device, Int, Tensor};
use flash_dma_problem::{
    Appending, AttentionError, AttentionOptions, CacheShape, DecodeProblem, MAX_DECODE_TOKENS,
    ScoreRole, SelectionRule, TensorName,
};

/// The `keep_window` keys of greatest score of each sequence and key/value head, among all keys received; with recent
/// keys and sinks in the configuration, the keys that [`Selector`](crate::Selector) keeps at the last position. No
/// other key will ever be attended again.
///
/// A sequence of the cache is one document: [`reset`](Self::reset) it where the next one begins, and attention equals
/// that over all of them with [`Selector::documents`](crate::Selector::documents). There is no cache for windows that
/// differ between heads, nor for given intervals.
///
/// Memory is allocated up front and does not grow with the context. Tokens replace the keys they evict in place, as
/// long as no clone shares the tensors. Ties go to the key of lower position, as in [`select`](crate::select()). See
/// the [module](super) for an example.
#[derive(Clone, Debug)]
pub struct DynamicMaskCache {
    pub(super) shape: CacheShape,
    pub(super) options: AttentionOptions,
    pub(super) device: Device,
    /// Number of tokens each sequence has received: the host's copy of the device's `seen`.
    pub(super) lengths: Vec<usize>,
    /// Absent only while an operation has it.
    pub(super) state: Option<State>,
    pub(super) hold: Hold,
    /// True if steps of one token are recorded in a graph, or will be.
    pub(super) recorded: bool,
}

/// See [`SlotTensors`].
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) k: Tensor<4>,
    pub(crate) v: Tensor<4>,
    pub(crate) score: Tensor<3>,
    pub(crate) position: Tensor<3, Int>,
    pub(crate) seen: Tensor<1, Int>,
}

impl DynamicMaskCacheConfig {
    twin! {
        /// An empty cache.
        pub fn init(&self, device: &Device) -> DynamicMaskCache = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the sizes, the element type or the options are refused, or there is no window.
    pub fn try_init(&self, device: &Device) -> Result<DynamicMaskCache, AttentionError> {
        DynamicMaskCache::try_new(self, device)
    }
}

impl DynamicMaskCache {
    twin! {
        /// An empty cache.
        pub fn new(config: &DynamicMaskCacheConfig, device: &Device) -> Self = Self::try_new;
    }

    /// Like [`new`](Self::new), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskCacheConfig::try_init`].
    pub fn try_new(
        config: &DynamicMaskCacheConfig,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let shape = config.shape()?;
        check_support(device, config.dtype)?;
        let device = device.clone().without_autodiff();
        let [batch, heads, window, _] = shape.kv_shape();
        let rows = || Tensor::zeros(shape.kv_shape(), (&device, DType::from(config.dtype)));
        let slots = [batch, heads, window];
        let state = State {
            k: rows(),
            v: rows(),
            score: Tensor::full(slots, f32::NEG_INFINITY, (&device, DType::F32)),
            position: Tensor::full(slots, -1, (&device, DType::I32)),
            seen: Tensor::zeros([batch], (&device, DType::I32)),
        };
        Ok(Self {
            shape,
            options: config.options,
            device,
            lengths: vec![0; batch],
            state: Some(state),
            hold: Hold::Off,
            recorded: false,
        })
    }

    twin! {
        /// Attends from new tokens to the cache and to each other, and appends them: `q` `[batch, q_heads, tokens,
        /// head_dim]` to the same shape, the last rows of attention over all tokens received.
        ///
        /// `k` and `v` are `[batch, kv_heads, tokens, head_dim]`, `scores` `[batch, kv_heads, tokens]`, f32 (f16 and
        /// bf16 are cast up), used in the cache's [`ScoreRole`]. Takes one token at a time, several to verify a
        /// speculation, or a whole prompt: up to 16 tokens are one decode step; more run like a training sequence,
        /// preceded by the cache's keys.
        pub fn step(
            &mut self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: Tensor<3>
        ) -> Tensor<4> = Self::try_step;
    }

    /// Like [`step`](Self::step), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types or devices do not fit the cache, autodiff tracks a tensor, a
    /// sequence would pass `i32::MAX` tokens, or tokens wait ([`AttentionError::TokensWait`]). The cache is unchanged
    /// then.
    pub fn try_step(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Tensor<3>,
    ) -> Result<Tensor<4>, AttentionError> {
        Ok(self.try_step_with_lse(q, k, v, scores)?.0)
    }

    /// [`try_step`](Self::try_step) that also returns the LSE of the logits: `[batch, q_heads, tokens]`, f32.
    ///
    /// # Errors
    ///
    /// See [`try_step`](Self::try_step).
    pub fn try_step_with_lse(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Tensor<3>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.hold.check()?;
        let element = self.shape.element;
        let tokens = Rows::new(&self.device, element, k, v, Some(scores))?;
        let q = plain(&self.device, TensorName::Query, q, Some(element))?;
        let problem = tokens.decode_over(&self.shape, &q.dims(), self.held(), &self.options)?;
        let problem = problem.with_appending(self.hold.appending());
        let (append, q) = (problem.append, q.into_dispatch());
        if problem.appending == Appending::Later {
            self.hold = Hold::Tokens(Box::new(tokens.clone()));
        }
        let (out, lse) = if append.tokens <= MAX_DECODE_TOKENS {
            let decoded = Dispatch::cache_decode_slots(q, self.take(), tokens.into_ops(), problem);
            self.put(decoded.slots);
            (decoded.out, decoded.lse)
        } else {
            let attended = self.chunk(q, tokens.clone(), &problem);
            if problem.appending == Appending::Now {
                let slots = Dispatch::cache_append_slots(self.take(), tokens.into_ops(), append);
                self.put(slots);
            }
            attended
        };
        if problem.appending == Appending::Now {
            self.lengthen(append.tokens);
        }
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    /// Attention of many tokens: selection and attention over the slots in order of position, then the tokens.
    fn chunk(
        &self,
        q: FloatTensor<Dispatch>,
        tokens: Rows,
        problem: &DecodeProblem,
    ) -> (FloatTensor<Dispatch>, FloatTensor<Dispatch>) {
        let (append, window) = (problem.append, self.shape.capacity());
        let mut rule = self.rule();
        let new = tokens.into_ops();
        let keys = if self.held() == 0 {
            ChunkKeys {
                k: new.k,
                v: new.v,
                scores: (new.scores.into_option()).expect("checked: slots have scores"),
                rank: OptionalFloat::None,
            }
        } else {
            // Sinks are the first keys of the sequence, not of this chunk: their rank already says so.
            rule.sinks = 0;
            Dispatch::cache_chunk_keys(self.state().clone().into_ops(), new, append)
        };
        let len = append.tokens + if self.held() == 0 { 0 } else { window };
        let whole = forward_problem(&self.shape, problem.q_shape(), len, &self.options);
        let rank = keys.rank.into_option();
        let rank = Tensor::from_dispatch(rank.unwrap_or_else(|| keys.scores.clone()));
        let intervals = compose(rank, rule, None).into_dispatch();
        let scores = match self.shape.adds_scores() {
            true => keys.scores,
            // Hidden keys are in no interval.
            false => {
                let scores = Tensor::<3>::from_dispatch(keys.scores);
                scores.zeros_like().into_dispatch()
            }
        };
        let selection = Selection::Scored {
            scores,
            intervals,
            learning: RankLearning::None,
        };
        let wanted = Wanted::Out;
        let results = Dispatch::dynamic_mask_forward(q, keys.k, keys.v, selection, whole, wanted);
        (results.out, results.lse)
    }

    twin! {
        /// Appends any number of tokens without attending: `k`, `v` and `scores` as in [`step`](Self::step).
        pub fn append(&mut self, k: Tensor<4>, v: Tensor<4>, scores: Tensor<3>) = Self::try_append;
    }

    /// Like [`append`](Self::append), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_step`](Self::try_step).
    pub fn try_append(
        &mut self,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Tensor<3>,
    ) -> Result<(), AttentionError> {
        self.hold.check()?;
        let tokens = Rows::new(&self.device, self.shape.element, k, v, Some(scores))?;
        self.append_new(tokens)
    }

    pub(super) fn append_new(&mut self, tokens: Rows) -> Result<(), AttentionError> {
        let problem = tokens.append_to(&self.shape, self.held())?;
        let slots = Dispatch::cache_append_slots(self.take(), tokens.into_ops(), problem);
        self.put(slots);
        self.lengthen(problem.tokens);
        Ok(())
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.shape.batch
    }

    /// Number of tokens each sequence has received, which is the position of its next token. Known on the host.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Selection rule of each head: the window, and the recent keys and sinks in it.
    ///
    /// # Panics
    ///
    /// Never: every cache of this type has one.
    #[must_use]
    pub fn rule(&self) -> SelectionRule {
        self.shape.rule().expect("the cache has slots")
    }

    /// Role of the scores.
    #[must_use]
    pub fn score_role(&self) -> ScoreRole {
        self.shape.score_role()
    }

    /// Number of keys that each head keeps.
    #[must_use]
    pub fn window(&self) -> usize {
        self.shape.capacity()
    }

    /// Options of attention.
    #[must_use]
    pub fn options(&self) -> AttentionOptions {
        self.options
    }

    /// Size on the device in bytes, independent of the context.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Device of the tensors.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Positions of the keys that each head keeps, ascending: `[sequence][head]`. Without hidden keys (a score of
    /// −∞), though they have a slot while recent. Waits for the device.
    ///
    /// # Panics
    ///
    /// If the device fails.
    #[must_use]
    pub fn positions_sync(&self) -> Vec<Vec<Vec<usize>>> {
        let [_, heads, window, _] = self.shape.kv_shape();
        let hidden = self.state().score.clone().equal_elem(f32::NEG_INFINITY);
        let shown = self.state().position.clone().mask_fill(hidden, -1);
        let data = shown.into_data_as::<i32>();
        let positions: Vec<i32> = data.iter::<i32>().collect();
        let head = |slots: &[i32]| {
            let mut live: Vec<usize> = slots.iter().filter_map(|&p| p.try_into().ok()).collect();
            live.sort_unstable();
            live
        };
        (positions.chunks_exact(heads * window))
            .map(|sequence| sequence.chunks_exact(window).map(head).collect())
            .collect()
    }

    pub(crate) fn shape(&self) -> &CacheShape {
        &self.shape
    }

    pub(crate) fn state(&self) -> &State {
        self.state.as_ref().expect("no operation has the cache")
    }

    /// A cache with unchecked state and shape.
    pub(crate) fn restored(&self, shape: CacheShape, state: State, lengths: Vec<usize>) -> Self {
        Self {
            shape,
            options: self.options,
            device: self.device.clone(),
            lengths,
            state: Some(state),
            hold: Hold::Off,
            recorded: false,
        }
    }

    fn held(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Takes the tensors for an operation that gives them back, so that nothing else shares them meanwhile.
    fn take(&mut self) -> SlotTensors<Dispatch> {
        let state = self.state.take().expect("no operation has the cache");
        state.into_ops()
    }

    fn put(&mut self, slots: SlotTensors<Dispatch>) {
        self.state = Some(State {
            k: Tensor::from_dispatch(slots.k),
            v: Tensor::from_dispatch(slots.v),
            score: Tensor::from_dispatch(slots.score),
            position: Tensor::from_dispatch(slots.position),
            seen: Tensor::from_dispatch(slots.seen),
        });
    }

    pub(super) fn lengthen(&mut self, tokens: usize) {
        self.lengths.iter_mut().for_each(|n| *n += tokens);
    }
}

impl State {
    fn into_ops(self) -> SlotTensors<Dispatch> {
        SlotTensors {
            k: self.k.into_dispatch(),
            v: self.v.into_dispatch(),
            score: self.score.into_dispatch(),
            position: self.position.into_dispatch(),
            seen: self.seen.into_dispatch(),
        }
    }
}

holds!(DynamicMaskCache);

impl DynamicMaskCache {
    /// Waiting tokens have no slots.
    fn release_waiting(&mut self) {}
}

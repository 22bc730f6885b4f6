//! Good calls through Burn, to be spoiled.

use crate::training::in_parts::{self, Layers};
use burn::backend::Dispatch;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_flash_dma::cache::{
    DynamicMaskCache, DynamicMaskCacheConfig, PagedCache, PagedCacheConfig,
};
use burn_flash_dma::nn::DynamicMaskAttentionConfig;
use burn_flash_dma::nn::Selection as Keys;
use burn_flash_dma::ops::{DynamicMaskOps, NormOps, OptionalFloat, RankLearning, Saved, Selection};
use burn_flash_dma::train::{DeviceGroup, Parts};
use burn_flash_dma::{
    Attention, AttentionError, AttentionMask, AttentionOptions, Documents, ElementType,
    HeadEncoding, Intervals, KeyRanges, MaskedAttention, NormProblem, Problem, Selector, TilePlan,
    select, try_dynamic_mask_attention,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// The shape of k and v.
pub const KV: [usize; 4] = [2, 2, 7, 8];

pub fn here() -> Device {
    Device::flex()
}

pub fn tracking() -> Device {
    here().autodiff()
}

pub fn causal() -> AttentionOptions {
    AttentionOptions::new()
}

pub fn layer() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(16, 2)
}

/// A selector inside documents of these lengths, of each sequence.
pub fn inside<const N: usize>(lengths: [Vec<usize>; N]) -> Selector {
    Selector::top(4).documents(Documents::from_lengths(lengths))
}

/// Heads to be encoded, of as many elements per row.
pub fn heads(dim: usize) -> HeadEncoding {
    HeadEncoding::new(zeros([2, 3, 4, dim]))
}

pub fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, &here())
}

/// A tensor on another device.
pub fn elsewhere<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let values = vec![0.0f32; shape.iter().product()];
    Tensor::from_data(TensorData::new(values, shape), &Device::cpu())
}

pub fn shows(shape: [usize; 4]) -> AttentionMask {
    let values = vec![true; shape.iter().product()];
    AttentionMask::visible(Tensor::<4, Bool>::from_data(
        TensorData::new(values, shape),
        &here(),
    ))
}

/// A good call of 5 queries over 7 keys, to be spoiled.
pub struct Call {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub scores: Tensor<3>,
    pub mask: Option<AttentionMask>,
    pub bias: Option<Tensor<4>>,
    pub options: AttentionOptions,
}

impl Call {
    fn spoiled(spoil: impl FnOnce(&mut Self)) -> Self {
        let mut call = Self {
            q: zeros([2, 4, 5, 8]),
            k: zeros(KV),
            v: zeros(KV),
            scores: zeros([2, 2, 7]),
            mask: None,
            bias: None,
            options: causal(),
        };
        spoil(&mut call);
        call
    }

    /// Broadcast, so that they take no memory.
    pub fn past_every_address(&mut self) {
        let most = 1 << 30;
        self.q = zeros([1, 4, 1, 8]).expand([most, 4, most, 8]);
        self.k = zeros([1, 2, 7, 8]).expand([most, 2, 7, 8]);
        self.v = self.k.clone();
        self.scores = zeros([1, 2, 7]).expand([most, 2, 7]);
    }

    pub fn all_of_dim(&mut self, dim: usize) {
        self.q = zeros([2, 4, 5, dim]);
        self.k = zeros([2, 2, 7, dim]);
        self.v = self.k.clone();
    }
}

pub fn dense(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    Attention::new(c.q, c.k, c.v)
        .options(c.options)
        .try_forward()
        .map(drop)
}

pub fn dynamic(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    try_dynamic_mask_attention(c.q, c.k, c.v, c.scores, c.options).map(drop)
}

/// The call with the selection of a selector.
pub fn by_selector(
    selector: Selector,
    spoil: impl FnOnce(&mut Call),
) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    let intervals = selector.select(c.scores.clone());
    let attention = Attention::new(c.q, c.k, c.v).scores(c.scores);
    let attention = attention.intervals(&intervals).options(c.options);
    attention.try_forward().map(drop)
}

pub fn select_by(selector: &Selector) -> Result<(), AttentionError> {
    selector.try_select(zeros([2, 2, 7])).map(drop)
}

/// Intervals of two keys.
pub fn given_pairs(pairs: [[i32; 2]; 2]) -> Result<(), AttentionError> {
    Intervals::try_from_tensor(Tensor::<4, Int>::from_ints([[pairs]], &here())).map(drop)
}

pub fn masked(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    MaskedAttention::new(c.q, c.k, c.v)
        .mask(c.mask)
        .bias(c.bias)
        .options(c.options)
        .try_forward()
        .map(drop)
}

pub fn with_plan(causal: bool) -> Result<(), AttentionError> {
    let c = Call::spoiled(|_| {});
    let plan = TilePlan::new(shows([1, 1, 5, 7]), [5, 7], causal);
    let attention = MaskedAttention::new(c.q, c.k, c.v).plan(&plan);
    attention.options(c.options).try_forward().map(drop)
}

pub fn ranges_on_two_devices() -> Result<(), AttentionError> {
    let keys = |device: &Device| {
        Tensor::<3, Int>::from_data(TensorData::new(vec![0i32; 5], [1, 1, 5]), device)
    };
    let ranges = KeyRanges::new(keys(&here()), keys(&Device::cpu()));
    TilePlan::try_from_ranges(ranges, [5, 7], true).map(drop)
}

/// A panic with the text of the error, from the operations below the functions that validate.
pub fn second_order(scores: Option<Tensor<3>>) -> Result<(), AttentionError> {
    let shape = [1, 1, 4, 8];
    let scored = scores.as_ref().map(|_| &shape[..3]);
    let f32 = ElementType::F32;
    let problem = Problem::new(&shape, &shape, &shape, scored, f32, &causal())?;
    let constant = || Tensor::<4>::zeros(shape, &tracking()).into_dispatch();
    let selection = match scores {
        None => Selection::All,
        Some(scores) => Selection::Scored {
            intervals: select(scores.clone(), 4).into_tensor().into_dispatch(),
            scores: Tensor::from_inner(scores).into_dispatch(),
            learning: RankLearning::None,
        },
    };
    let saved = Saved {
        out: constant(),
        residual: OptionalFloat::None,
        lse: Tensor::<3>::zeros([1, 1, 4], &tracking()).into_dispatch(),
        lse_rest: OptionalFloat::None,
        grad_out: Tensor::<4>::zeros(shape, &tracking())
            .require_grad()
            .into_dispatch(),
        grad_lse: OptionalFloat::None,
    };
    let (q, k, v) = (constant(), constant(), constant());
    panics(|| Dispatch::dynamic_mask_backward(q, k, v, selection, saved, problem))
}

/// The error whose text a call panics with: a gradient of the gradient.
fn panics<T>(call: impl FnOnce() -> T) -> Result<(), AttentionError> {
    let Err(panic) = catch_unwind(AssertUnwindSafe(call)) else {
        return Ok(());
    };
    let tensor = burn_flash_dma::TensorName::GradOut;
    let error = AttentionError::SecondOrder { tensor };
    assert_eq!(panic.downcast_ref::<String>(), Some(&error.to_string()));
    Err(error)
}

/// The second gradient of a norm.
pub fn second_norm() -> Result<(), AttentionError> {
    let problem = NormProblem::rows(&[3, 8], &[8], ElementType::F32, 1e-5)?;
    let rows = || Tensor::<2>::zeros([3, 8], &tracking());
    let gamma = Tensor::<1>::zeros([8], &tracking()).into_dispatch();
    let (x, grad_out) = (
        rows().into_dispatch(),
        rows().require_grad().into_dispatch(),
    );
    panics(|| Dispatch::rms_norm_backward(x, gamma, grad_out, problem))
}

/// A good step of 3 tokens, to be spoiled.
pub struct Step {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub scores: Tensor<3>,
    pub scored: bool,
}

impl Step {
    fn spoiled(spoil: impl FnOnce(&mut Self)) -> Self {
        let mut step = Self {
            q: zeros([2, 4, 3, 8]),
            k: zeros([2, 2, 3, 8]),
            v: zeros([2, 2, 3, 8]),
            scores: zeros([2, 2, 3]),
            scored: false,
        };
        spoil(&mut step);
        step
    }

    pub fn all_of_len(&mut self, len: usize) {
        self.q = zeros([2, 4, len, 8]);
        self.k = zeros([2, 2, len, 8]);
        self.v = self.k.clone();
    }
}

pub fn slots(
    head_dim: usize,
    spoil: impl FnOnce(&mut AttentionOptions),
) -> Result<DynamicMaskCache, AttentionError> {
    let mut options = causal().with_keep_window(4);
    spoil(&mut options);
    DynamicMaskCacheConfig::new(2, 2, head_dim, options).try_init(&here())
}

/// Slots of a window of 4 keys with recent ones and sinks.
pub fn slots_that_keep(
    recent: Option<usize>,
    sinks: Option<usize>,
) -> Result<DynamicMaskCache, AttentionError> {
    let options = causal().with_keep_window(4);
    let config = DynamicMaskCacheConfig::new(2, 2, 8, options);
    let config = config.with_recent(recent).with_sinks(sinks);
    config.try_init(&here())
}

pub fn step(spoil: impl FnOnce(&mut Step)) -> Result<(), AttentionError> {
    let s = Step::spoiled(spoil);
    slots(8, |_| {})?
        .try_step(s.q, s.k, s.v, s.scores)
        .map(drop)
}

/// Slots with 3 held tokens.
pub fn waiting() -> Result<DynamicMaskCache, AttentionError> {
    let s = Step::spoiled(|_| {});
    let mut cache = slots(8, |_| {})?;
    cache.try_hold()?;
    cache.try_step(s.q, s.k, s.v, s.scores)?;
    Ok(cache)
}

/// Pages of 4 tokens: 3 exist, and a sequence may have 2.
pub fn pages(spoil: impl FnOnce(&mut PagedCacheConfig)) -> Result<PagedCache, AttentionError> {
    let mut config = PagedCacheConfig::new(2, 2, 8, 8)
        .with_page_len(4)
        .with_pages(3)
        .with_grow_by(0);
    spoil(&mut config);
    config.try_init(&here())
}

pub fn page_step(spoil: impl FnOnce(&mut Step)) -> Result<(), AttentionError> {
    let s = Step::spoiled(spoil);
    let scores = s.scored.then_some(s.scores);
    pages(|_| {})?.try_step(s.q, s.k, s.v, scores).map(drop)
}

/// The record of an empty cache, changed.
pub fn reloaded(
    change: impl FnOnce(&mut serde_json::Value),
) -> Result<DynamicMaskCache, AttentionError> {
    let mut record = serde_json::to_value(slots(8, |_| {})?.to_record_sync()).unwrap();
    change(&mut record);
    let record = serde_json::from_value(record).unwrap();
    DynamicMaskCache::try_from_record(record, &here())
}

pub fn past_the_last_position() -> Result<(), AttentionError> {
    let near = [i32::MAX - 2; 2].iter().flat_map(|n| n.to_le_bytes());
    let near = serde_json::to_value(near.collect::<Vec<u8>>()).unwrap();
    let mut cache = reloaded(|record| record["seen"]["bytes"] = near)?;
    let s = Step::spoiled(|_| {});
    cache.try_step(s.q, s.k, s.v, s.scores).map(drop)
}

pub fn a_record_of_another_shape() -> Result<(), AttentionError> {
    reloaded(|record| record["score"] = record["seen"].clone()).map(drop)
}

/// A step that no device has the time for.
pub fn a_group_without_time() -> Result<(), AttentionError> {
    let layer = layer().with_selection(Keys::keep(4)).init(&tracking());
    let layers = Layers { all: vec![layer] };
    let mut group = DeviceGroup::try_new(&[here()])?.with_timeout(Duration::ZERO);
    let [x, slope] = [0, 1].map(|_| Tensor::zeros([1, 6, 16], &here()));
    let learned = group.try_gradients(&layers, &Parts::new(1, 6, 6), &in_parts::Step { x, slope });
    learned.map(drop)
}

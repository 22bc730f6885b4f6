//! Every variant of `AttentionError`, provoked through the public API: one table, which is complete or fails.

use burn::backend::Dispatch;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::cache::{
    DynamicMaskCache, DynamicMaskCacheConfig, PagedCache, PagedCacheConfig,
};
use burn_flash_dma::ops::{DynamicMaskOps, OptionalFloat, Saved, Selection};
use burn_flash_dma::{
    AttentionError, AttentionMask, AttentionOptions, ElementType, KeyRanges, MaskedProblem,
    Problem, TilePlan, select, try_attention, try_dynamic_mask_attention,
    try_dynamic_mask_attention_with_intervals, try_masked_attention,
    try_masked_attention_with_plan, try_select,
};
use flash_dma_cpu::{self as cpu, Interval, MaskedGradients, MaskedInputs, View};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What is called, what it must refuse with, and the call.
type Row = (Operation, &'static str, fn() -> Result<(), AttentionError>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Dense,
    Dynamic,
    Masked,
    Slots,
    Pages,
    /// The engines' own functions, which take buffers.
    Buffers,
}
use Operation::{Buffers, Dense, Dynamic, Masked, Pages, Slots};

const TABLE: &[Row] = &[
    (Dense, "Shape", || dense(|c| c.k = zeros([3, 2, 7, 8]))),
    (Dense, "HeadRatio", || dense(|c| c.q = zeros([2, 3, 5, 8]))),
    (Dense, "HeadDim", || dense(|c| c.all_of_dim(12))),
    (Dense, "ElementType", || {
        dense(|c| c.k = c.k.clone().cast(DType::F16))
    }),
    (Dense, "Device", || dense(|c| c.v = elsewhere([2, 2, 7, 8]))),
    (Dense, "WindowWithoutScores", || {
        dense(|c| c.options.keep_window = Some(2))
    }),
    (Dense, "Scale", || {
        dense(|c| c.options.scale = Some(f32::INFINITY))
    }),
    (Dense, "Softcap", || {
        dense(|c| c.options.softcap = Some(0.0))
    }),
    (Dense, "TooLarge", || dense(Call::past_every_address)),
    (Dense, "SecondOrder", || second_order(None)),
    (Dynamic, "Shape", || {
        dynamic(|c| c.scores = zeros([2, 4, 7]))
    }),
    (Dynamic, "HeadRatio", || {
        dynamic(|c| c.q = zeros([2, 3, 5, 8]))
    }),
    (Dynamic, "HeadDim", || dynamic(|c| c.all_of_dim(264))),
    (Dynamic, "ElementType", || {
        dynamic(|c| c.scores = c.scores.clone().cast(DType::F64))
    }),
    (Dynamic, "Device", || {
        dynamic(|c| c.scores = elsewhere([2, 2, 7]))
    }),
    (Dynamic, "ZeroWindow", || {
        dynamic(|c| c.options.keep_window = Some(0))
    }),
    (Dynamic, "ZeroWindow", || {
        try_select(zeros([2, 2, 7]), 0).map(drop)
    }),
    (Dynamic, "IntervalsWindow", || {
        with_intervals(3, |c| c.options.keep_window = Some(4))
    }),
    (Dynamic, "Scale", || {
        dynamic(|c| c.options.scale = Some(f32::NAN))
    }),
    (Dynamic, "Softcap", || {
        dynamic(|c| c.options.softcap = Some(-1.0))
    }),
    (Dynamic, "TooLarge", || dynamic(Call::past_every_address)),
    (Dynamic, "SecondOrder", || {
        second_order(Some(zeros([1, 1, 4])))
    }),
    (Masked, "Shape", || masked(|c| c.v = zeros([2, 2, 6, 8]))),
    (Masked, "HeadRatio", || {
        masked(|c| c.q = zeros([2, 3, 5, 8]))
    }),
    (Masked, "HeadDim", || masked(|c| c.all_of_dim(12))),
    (Masked, "ElementType", || {
        masked(|c| c.bias = Some(zeros([1, 1, 5, 7]).cast(DType::F64)))
    }),
    (Masked, "Device", || {
        masked(|c| c.bias = Some(elsewhere([1, 1, 5, 7])))
    }),
    (Masked, "Broadcast", || {
        masked(|c| c.bias = Some(zeros([1, 3, 5, 7])))
    }),
    (Masked, "Broadcast", || {
        masked(|c| c.mask = Some(shows([1, 1, 4, 7])))
    }),
    (Masked, "PlanCausal", || with_plan(false)),
    (Masked, "RangesDevice", ranges_on_two_devices),
    (Masked, "WindowWithoutScores", || {
        masked(|c| c.options.keep_window = Some(2))
    }),
    (Masked, "Scale", || {
        masked(|c| c.options.scale = Some(f32::NAN))
    }),
    (Masked, "Softcap", || {
        masked(|c| c.options.softcap = Some(f32::INFINITY))
    }),
    (Masked, "TooLarge", || masked(Call::past_every_address)),
    (Slots, "Shape", || step(|c| c.v = zeros([2, 2, 4, 8]))),
    (Slots, "HeadRatio", || step(|c| c.q = zeros([2, 3, 3, 8]))),
    (Slots, "HeadDim", || slots(12, |_| {}).map(drop)),
    (Slots, "ElementType", || {
        step(|c| c.q = c.q.clone().cast(DType::F16))
    }),
    (Slots, "Device", || step(|c| c.k = elsewhere([2, 2, 3, 8]))),
    (Slots, "ZeroWindow", || {
        slots(8, |o| o.keep_window = Some(0)).map(drop)
    }),
    (Slots, "Scale", || {
        slots(8, |o| o.scale = Some(f32::NAN)).map(drop)
    }),
    (Slots, "Softcap", || {
        slots(8, |o| o.softcap = Some(-1.0)).map(drop)
    }),
    (Slots, "CacheWindow", || {
        slots(8, |o| o.keep_window = None).map(drop)
    }),
    (Slots, "CacheNotCausal", || {
        slots(8, |o| o.causal = false).map(drop)
    }),
    (Slots, "Sequence", || slots(8, |_| {})?.try_reorder(&[0, 2])),
    (Slots, "Tracked", || {
        step(|c| c.k = Tensor::zeros([2, 2, 3, 8], &tracking()).require_grad())
    }),
    (Slots, "Positions", past_the_last_position),
    (Slots, "Record", a_record_of_another_shape),
    (Slots, "TooLarge", || {
        slots(8, |o| o.keep_window = Some(1 << 40)).map(drop)
    }),
    (Pages, "Shape", || page_step(|c| c.q = zeros([2, 4, 2, 8]))),
    (Pages, "HeadRatio", || {
        page_step(|c| c.q = zeros([2, 3, 3, 8]))
    }),
    (Pages, "ElementType", || {
        page_step(|c| c.v = c.v.clone().cast(DType::F16))
    }),
    (Pages, "Device", || {
        page_step(|c| c.v = elsewhere([2, 2, 3, 8]))
    }),
    (Pages, "Tracked", || {
        page_step(|c| c.v = Tensor::zeros([2, 2, 3, 8], &tracking()).require_grad())
    }),
    (Pages, "HeadDim", || {
        PagedCacheConfig::new(2, 2, 12, 8)
            .try_init(&here())
            .map(drop)
    }),
    (Pages, "EmptyPages", || pages(|c| c.page_len = 0).map(drop)),
    (Pages, "CacheWindow", || {
        pages(|c| c.options.keep_window = Some(4)).map(drop)
    }),
    (Pages, "CacheNotCausal", || {
        pages(|c| c.options.causal = false).map(drop)
    }),
    (Pages, "CacheScores", || page_step(|c| c.scored = true)),
    (Pages, "PagesFull", || page_step(|c| c.all_of_len(9))),
    (Pages, "PagesUsed", || page_step(|c| c.all_of_len(8))),
    (Pages, "Sequence", || pages(|_| {})?.try_reorder(&[0, 7])),
    (Buffers, "Rank", || {
        Problem::new(&[2, 4, 8], &KV, &KV, None, ElementType::F32, &causal()).map(drop)
    }),
    (Buffers, "Strides", || select_view([14, 7, 2], 28)),
    (Buffers, "Buffer", || select_view([14, 7, 1], 20)),
    (Buffers, "ScoresWithoutIntervals", || backward(false, true)),
    (Buffers, "ScoresGradient", || backward(true, false)),
    (Buffers, "BiasGradient", a_gradient_of_no_bias),
    (Buffers, "Unsupported", wgmma_on_a_cpu),
    (Buffers, "DeviceFailed", || failed_launch()),
];

const KV: [usize; 4] = [2, 2, 7, 8];

#[test]
fn every_refusal_has_its_error() {
    let mut provoked = BTreeSet::new();
    for (row, (operation, kind, call)) in TABLE.iter().enumerate() {
        match call() {
            Err(error) => assert_eq!(error.kind(), *kind, "row {row}, {operation:?}: {error}"),
            Ok(()) => panic!("row {row}: {operation:?} took what {kind} refuses"),
        }
        provoked.insert(*kind);
    }
    let all: BTreeSet<&str> = AttentionError::KINDS.iter().copied().collect();
    let missing: Vec<_> = all.difference(&provoked).collect();
    assert!(missing.is_empty(), "no call of the table gives {missing:?}");
}

fn here() -> Device {
    Device::flex()
}

fn tracking() -> Device {
    here().autodiff()
}

fn causal() -> AttentionOptions {
    AttentionOptions::new()
}

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, &here())
}

/// On another device.
fn elsewhere<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let values = vec![0.0f32; shape.iter().product()];
    Tensor::from_data(TensorData::new(values, shape), &Device::cpu())
}

fn shows(shape: [usize; 4]) -> AttentionMask {
    let values = vec![true; shape.iter().product()];
    AttentionMask::visible(Tensor::<4, Bool>::from_data(
        TensorData::new(values, shape),
        &here(),
    ))
}

/// A good call of 5 queries over 7 keys, to be spoiled.
struct Call {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
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
    fn past_every_address(&mut self) {
        let most = 1 << 30;
        self.q = zeros([1, 4, 1, 8]).expand([most, 4, most, 8]);
        self.k = zeros([1, 2, 7, 8]).expand([most, 2, 7, 8]);
        self.v = self.k.clone();
        self.scores = zeros([1, 2, 7]).expand([most, 2, 7]);
    }

    fn all_of_dim(&mut self, dim: usize) {
        self.q = zeros([2, 4, 5, dim]);
        self.k = zeros([2, 2, 7, dim]);
        self.v = self.k.clone();
    }
}

fn dense(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    try_attention(c.q, c.k, c.v, c.options).map(drop)
}

fn dynamic(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    try_dynamic_mask_attention(c.q, c.k, c.v, c.scores, c.options).map(drop)
}

fn with_intervals(window: usize, spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    let intervals = select(c.scores.clone(), window);
    try_dynamic_mask_attention_with_intervals(c.q, c.k, c.v, c.scores, &intervals, c.options)
        .map(drop)
}

fn masked(spoil: impl FnOnce(&mut Call)) -> Result<(), AttentionError> {
    let c = Call::spoiled(spoil);
    try_masked_attention(c.q, c.k, c.v, c.mask, c.bias, c.options).map(drop)
}

fn with_plan(causal: bool) -> Result<(), AttentionError> {
    let c = Call::spoiled(|_| {});
    let plan = TilePlan::new(shows([1, 1, 5, 7]), [5, 7], causal);
    try_masked_attention_with_plan(c.q, c.k, c.v, &plan, None, c.options).map(drop)
}

fn ranges_on_two_devices() -> Result<(), AttentionError> {
    let keys = |device: &Device| {
        Tensor::<3, Int>::from_data(TensorData::new(vec![0i32; 5], [1, 1, 5]), device)
    };
    let ranges = KeyRanges::new(keys(&here()), keys(&Device::cpu()));
    TilePlan::try_from_ranges(ranges, [5, 7], true).map(drop)
}

/// A panic with the text of the error, from the operations below the functions that validate.
fn second_order(scores: Option<Tensor<3>>) -> Result<(), AttentionError> {
    let shape = [1, 1, 4, 8];
    let problem = Problem::new(
        &shape,
        &shape,
        &shape,
        scores.as_ref().map(|_| &shape[..3]),
        ElementType::F32,
        &causal(),
    )?;
    let constant = || Tensor::<4>::zeros(shape, &tracking()).into_dispatch();
    let selection = match scores {
        None => Selection::All,
        Some(scores) => Selection::Scored {
            intervals: select(scores.clone(), 4).into_tensor().into_dispatch(),
            scores: Tensor::from_inner(scores).into_dispatch(),
        },
    };
    let saved = Saved {
        out: constant(),
        lse: Tensor::<3>::zeros([1, 1, 4], &tracking()).into_dispatch(),
        grad_out: Tensor::<4>::zeros(shape, &tracking())
            .require_grad()
            .into_dispatch(),
        grad_lse: OptionalFloat::None,
    };
    let (q, k, v) = (constant(), constant(), constant());
    let panic = catch_unwind(AssertUnwindSafe(|| {
        Dispatch::dynamic_mask_backward(q, k, v, selection, saved, problem)
    }));
    let Err(panic) = panic else { return Ok(()) };
    let tensor = burn_flash_dma::TensorName::GradOut;
    let error = AttentionError::SecondOrder { tensor };
    assert_eq!(panic.downcast_ref::<String>(), Some(&error.to_string()));
    Err(error)
}

/// A good step of 3 tokens, to be spoiled.
struct Step {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    scored: bool,
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

    fn all_of_len(&mut self, len: usize) {
        self.q = zeros([2, 4, len, 8]);
        self.k = zeros([2, 2, len, 8]);
        self.v = self.k.clone();
    }
}

fn slots(
    head_dim: usize,
    spoil: impl FnOnce(&mut AttentionOptions),
) -> Result<DynamicMaskCache, AttentionError> {
    let mut options = causal().with_keep_window(4);
    spoil(&mut options);
    DynamicMaskCacheConfig::new(2, 2, head_dim, options).try_init(&here())
}

fn step(spoil: impl FnOnce(&mut Step)) -> Result<(), AttentionError> {
    let s = Step::spoiled(spoil);
    slots(8, |_| {})?
        .try_step(s.q, s.k, s.v, s.scores)
        .map(drop)
}

/// Pages of 4 tokens: 3 are there, and a sequence may have 2.
fn pages(spoil: impl FnOnce(&mut PagedCacheConfig)) -> Result<PagedCache, AttentionError> {
    let mut config = PagedCacheConfig::new(2, 2, 8, 8)
        .with_page_len(4)
        .with_pages(3)
        .with_grow_by(0);
    spoil(&mut config);
    config.try_init(&here())
}

fn page_step(spoil: impl FnOnce(&mut Step)) -> Result<(), AttentionError> {
    let s = Step::spoiled(spoil);
    let scores = s.scored.then_some(s.scores);
    pages(|_| {})?.try_step(s.q, s.k, s.v, scores).map(drop)
}

/// The record of an empty cache, changed.
fn reloaded(
    change: impl FnOnce(&mut serde_json::Value),
) -> Result<DynamicMaskCache, AttentionError> {
    let mut record = serde_json::to_value(slots(8, |_| {})?.to_record_sync()).unwrap();
    change(&mut record);
    let record = serde_json::from_value(record).unwrap();
    DynamicMaskCache::try_from_record(record, &here())
}

fn past_the_last_position() -> Result<(), AttentionError> {
    let near = [i32::MAX - 2; 2].iter().flat_map(|n| n.to_le_bytes());
    let near = serde_json::to_value(near.collect::<Vec<u8>>()).unwrap();
    let mut cache = reloaded(|record| record["seen"]["bytes"] = near)?;
    let s = Step::spoiled(|_| {});
    cache.try_step(s.q, s.k, s.v, s.scores).map(drop)
}

fn a_record_of_another_shape() -> Result<(), AttentionError> {
    reloaded(|record| record["score"] = record["seen"].clone()).map(drop)
}

fn select_view(strides: [usize; 3], len: usize) -> Result<(), AttentionError> {
    let data = vec![0.0; len];
    let view = View {
        data: &data,
        shape: [2, 2, 7],
        strides,
    };
    let mut intervals = [Interval { first: 0, end: 0 }; 28];
    cpu::select(view, 3, &mut intervals)
}

/// A backward pass of the CPU engine over one key, with or without the scores and their gradient.
fn backward(scores: bool, gradient: bool) -> Result<(), AttentionError> {
    let shape = [1, 1, 1, 8];
    let options = causal();
    let problem = Problem::new(
        &shape,
        &shape,
        &shape,
        Some(&shape[..3]),
        ElementType::F32,
        &options,
    )?;
    let (row, one) = ([0.0f32; 8], [0.0f32]);
    let rows = View::contiguous(&row, shape);
    let intervals = [Interval { first: 0, end: 1 }];
    let inputs = cpu::Inputs {
        q: rows,
        k: rows,
        v: rows,
        selection: scores.then_some(cpu::Selection {
            scores: View::contiguous(&one, [1, 1, 1]),
            intervals: &intervals,
        }),
    };
    let saved = cpu::Saved {
        out: rows,
        lse: &one,
        grad_out: rows,
        grad_lse: None,
    };
    let (mut q, mut k, mut v, mut z) = (row, row, row, one);
    let grads = cpu::Gradients {
        q: &mut q,
        k: &mut k,
        v: &mut v,
        scores: gradient.then_some(&mut z),
    };
    cpu::backward(&problem, inputs, saved, grads)
}

fn a_gradient_of_no_bias() -> Result<(), AttentionError> {
    let shape = [1, 1, 1, 8];
    let problem = MaskedProblem::new(
        &shape,
        &shape,
        &shape,
        None,
        None,
        ElementType::F32,
        &causal(),
    )?;
    let (row, one) = ([0.0f32; 8], [0.0f32]);
    let rows = View::contiguous(&row, shape);
    let inputs = MaskedInputs {
        q: rows,
        k: rows,
        v: rows,
        bits: None,
        bias: None,
    };
    let saved = cpu::Saved {
        out: rows,
        lse: &one,
        grad_out: rows,
        grad_lse: None,
    };
    let (mut q, mut k, mut v, mut bias) = (row, row, row, one);
    let grads = MaskedGradients {
        q: &mut q,
        k: &mut k,
        v: &mut v,
        bias: Some(&mut bias),
    };
    cpu::masked_backward(&problem, inputs, saved, grads)
}

/// The kernels on CubeCL's CPU runtime.
mod kernels {
    use super::{AttentionError, ElementType, Problem, causal};
    use cubecl::prelude::TensorBinding;
    use cubecl::server::Handle;
    use flash_dma_kernels as engine;

    pub fn run(engine: engine::Engine) -> Result<(), AttentionError> {
        let client = cubecl::Device::cpu().expect("the build has it").client();
        let shape = [1, 1, 1, 8];
        let problem = Problem::new(&shape, &shape, &shape, None, ElementType::F32, &causal())?;
        let rows = |handle: &Handle| binding(handle, &[8, 8, 8, 1], &shape);
        let q = rows(&client.create_from_slice(&[0; 32]));
        let inputs = engine::Inputs {
            q: q.clone(),
            k: q.clone(),
            v: q,
            selection: None,
        };
        let [out, lse] = [(); 2].map(|()| client.empty(32));
        let to = (rows(&out), binding(&lse, &[1, 1, 1], &[1, 1, 1]));
        engine::forward_on(engine, &client, &problem, inputs, to.0, to.1)?;
        // Memory that nothing has ever written.
        let unwritten = client.empty(1 << 60);
        engine::check(&client, "this test", [&out, &lse])?;
        engine::check(&client, "this test", [&unwritten])
    }

    fn binding(handle: &Handle, strides: &[usize], shape: &[usize]) -> TensorBinding {
        let (strides, shape) = (strides.iter().copied(), shape.iter().copied());
        // SAFETY: the buffers have eight elements, and no shape has more.
        unsafe { TensorBinding::from_raw_parts(handle.clone(), strides.collect(), shape.collect()) }
    }
}

fn wgmma_on_a_cpu() -> Result<(), AttentionError> {
    kernels::run(flash_dma_kernels::Engine::Wgmma)
}

fn failed_launch() -> Result<(), AttentionError> {
    kernels::run(flash_dma_kernels::Engine::Portable)
}

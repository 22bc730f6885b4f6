//! Every variant of `AttentionError`, provoked through the public API: one table, which is complete or fails.

mod buffers;
mod calls;

use buffers::{
    a_gradient_of_no_bias, a_norm_without_weight, a_residual_of_f32, backward, kernels, select_view,
};
use burn::tensor::{DType, Int, Tensor};
use burn_flash_dma::cache::{BlockTable, DynamicMaskCache, PagedCache, PagedCacheConfig};
use burn_flash_dma::engines::{Engine, EngineChoice};
use burn_flash_dma::memory::{Passes, required_bytes};
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{DynamicMaskInput, Rope, Selection};
use burn_flash_dma::{
    AlibiSlopes, AttentionError, Documents, Dropout, ElementType, Intervals, KeyRanges, Problem,
    Selector, try_merge_attention, try_rms_norm, try_select, try_sliding_window,
};
use calls::{
    Call, KV, a_group_without_time, a_record_of_another_shape, by_selector, causal, dense, dynamic,
    elsewhere, given_pairs, heads, here, inside, layer, masked, page_step, pages,
    past_the_last_position, ranges_on_two_devices, second_norm, second_order, select_by, shows,
    slots, slots_that_keep, step, tracking, waiting, with_plan, zeros,
};
use flash_dma_problem::check_grid;
use std::collections::BTreeSet;

type Row = (&'static str, fn() -> Result<(), AttentionError>);

/// The table, of an error's kind and a call that is refused with it in each row.
macro_rules! table {
    ($($kind:ident: $call:expr,)*) => {
        const TABLE: &[Row] = &[$((stringify!($kind), || $call.map(drop))),*];
    };
}

table! {
    // Attention over all keys.
    Shape: dense(|c| c.k = zeros([3, 2, 7, 8])),
    HeadRatio: dense(|c| c.q = zeros([2, 3, 5, 8])),
    HeadDim: dense(|c| c.all_of_dim(12)),
    ElementType: dense(|c| c.k = c.k.clone().cast(DType::F16)),
    Device: dense(|c| c.v = elsewhere([2, 2, 7, 8])),
    WindowWithoutScores: dense(|c| c.options.keep_window = Some(2)),
    Scale: dense(|c| c.options.scale = Some(f32::INFINITY)),
    Softcap: dense(|c| c.options.softcap = Some(0.0)),
    DropoutRate: Dropout::new(1.0, 0),
    AlibiSlope: AlibiSlopes::new(&[f32::NAN]),
    AlibiHeads: dense(|c| c.options.alibi = Some(AlibiSlopes::standard(2))),
    TooLarge: dense(Call::past_every_address),
    NoParts: try_merge_attention([]),
    SecondOrder: second_order(None),
    WholeSequence: {
        let layer = MultiHeadAttentionConfig::new(16, 2).init(&here());
        let mut cache = MhaCache::autoregressive();
        let mut read = || {
            let input = MhaInput::self_attn(zeros([1, 3, 16]));
            layer.try_forward_cache(input, &mut cache).map(drop)
        };
        read()?;
        read()
    },
    Engine: dense(|c| c.options.engine = EngineChoice::Only(Engine::Wgmma)),
    // By scores and selections.
    Shape: dynamic(|c| c.scores = zeros([2, 4, 7])),
    HeadRatio: dynamic(|c| c.q = zeros([2, 3, 5, 8])),
    HeadDim: dynamic(|c| c.all_of_dim(264)),
    ElementType: dynamic(|c| c.scores = c.scores.clone().cast(DType::F64)),
    Device: dynamic(|c| c.scores = elsewhere([2, 2, 7])),
    ZeroWindow: dynamic(|c| c.options.keep_window = Some(0)),
    ZeroWindow: try_select(zeros([2, 2, 7]), 0),
    IntervalsWindow: by_selector(Selector::top(3), |c| c.options.keep_window = Some(4)),
    WindowParts: select_by(&Selector::top(4).recent(3).sinks(2)),
    WindowParts: select_by(&Selector::top(vec![9, 4]).recent(5)),
    PartsWithoutWindow: layer().with_selection(Selection::new().with_sinks(1)).try_init(&here()),
    ZeroWindow: select_by(&Selector::top(vec![3, 0])),
    ZeroWindow: try_sliding_window([2, 2, 7], 0, &here()),
    HeadWindows: select_by(&Selector::top(vec![3, 4, 5])),
    SelectionNotCausal: by_selector(Selector::top(4).recent(1), |c| c.options.causal = false),
    SelectionNotCausal: by_selector(Selector::top(4).sinks(1), |c| c.options.causal = false),
    SelectionNotCausal: by_selector(inside([vec![7], vec![7]]), |c| c.options.causal = false),
    DocumentQueries: by_selector(inside([vec![7], vec![3, 4]]), |_| {}),
    DocumentBatch: select_by(&inside([vec![7]])),
    DocumentTokens: select_by(&inside([vec![7], vec![3, 5]])),
    DocumentBatch: Documents::from_lengths([vec![7]]).try_intervals([2, 2, 7], &here()),
    TooLarge: Documents::try_from_padded([7, 8], 7),
    CumulativeLengths: Documents::try_from_cu_seqlens(&[1, 4]),
    CumulativeLengths: Documents::try_from_cu_seqlens(&[0, 4, 3]),
    IntervalBounds: given_pairs([[0, 2], [0, 2]]),
    IntervalBounds: given_pairs([[0, 2], [1, 0]]),
    IntervalBounds: given_pairs([[0, 3], [1, 2]]),
    Shape: Intervals::try_from_tensor(Tensor::<4, Int>::zeros([1, 1, 2, 3], &here())),
    Scale: dynamic(|c| c.options.scale = Some(f32::NAN)),
    Softcap: dynamic(|c| c.options.softcap = Some(-1.0)),
    TooLarge: dynamic(Call::past_every_address),
    Turns: layer().with_selection(Selection::keep(4).with_turns(Some(0))).try_init(&here()),
    SecondOrder: second_order(Some(zeros([1, 1, 4]))),
    // Under masks and biases.
    Shape: masked(|c| c.v = zeros([2, 2, 6, 8])),
    HeadRatio: masked(|c| c.q = zeros([2, 3, 5, 8])),
    HeadDim: masked(|c| c.all_of_dim(12)),
    ElementType: masked(|c| c.bias = Some(zeros([1, 1, 5, 7]).cast(DType::F64))),
    Device: masked(|c| c.bias = Some(elsewhere([1, 1, 5, 7]))),
    Broadcast: masked(|c| c.bias = Some(zeros([1, 3, 5, 7]))),
    Broadcast: masked(|c| c.mask = Some(shows([1, 1, 4, 7]))),
    PlanCausal: with_plan(false),
    RangesDevice: ranges_on_two_devices(),
    DocumentCounts: {
        let [queries, keys] = [vec![5], vec![3, 4]].map(|own| Documents::from_lengths([own]));
        KeyRanges::try_packed([&queries, &keys], true, &here())
    },
    DocumentBatch: {
        let queries = Documents::from_lengths([vec![5], vec![5]]);
        let keys = Documents::from_lengths([vec![7]]);
        KeyRanges::try_packed([&queries, &keys], true, &here())
    },
    MaskedSelection: {
        let input = DynamicMaskInput::new(zeros([1, 5, 16])).mask(shows([1, 1, 5, 5]));
        layer().init(&here()).try_selection(input)
    },
    WindowWithoutScores: masked(|c| c.options.keep_window = Some(2)),
    Scale: masked(|c| c.options.scale = Some(f32::NAN)),
    Softcap: masked(|c| c.options.softcap = Some(f32::INFINITY)),
    TooLarge: masked(Call::past_every_address),
    Engine: masked(|c| c.options.engine = EngineChoice::Only(Engine::Wgmma)),
    // Caches of slots.
    Shape: step(|c| c.v = zeros([2, 2, 4, 8])),
    HeadRatio: step(|c| c.q = zeros([2, 3, 3, 8])),
    HeadDim: slots(12, |_| {}),
    WindowParts: slots_that_keep(Some(3), Some(2)),
    WindowParts: slots_that_keep(Some(5), None),
    ElementType: step(|c| c.q = c.q.clone().cast(DType::F16)),
    Device: step(|c| c.k = elsewhere([2, 2, 3, 8])),
    ZeroWindow: slots(8, |o| o.keep_window = Some(0)),
    Scale: slots(8, |o| o.scale = Some(f32::NAN)),
    Softcap: slots(8, |o| o.softcap = Some(-1.0)),
    CacheWindow: slots(8, |o| o.keep_window = None),
    CacheNotCausal: slots(8, |o| o.causal = false),
    CacheDropout: slots(8, |o| o.dropout = Dropout::new(0.1, 0).ok()),
    CacheAlibi: slots(8, |o| o.alibi = Some(AlibiSlopes::standard(4))),
    Sequence: slots(8, |_| {})?.try_reorder(&[0, 2]),
    TokensWait: waiting()?.try_reset(0),
    TooManyAccepted: waiting()?.try_accept(4),
    NotHolding: slots(8, |_| {})?.try_accept(0),
    NoCaches: DynamicMaskCache::try_cat(Vec::new()),
    JoinedCaches: {
        let other = slots(8, |o| o.keep_window = Some(5))?;
        DynamicMaskCache::try_cat(vec![slots(8, |_| {})?, other])
    },
    Tracked: step(|c| c.k = Tensor::zeros([2, 2, 3, 8], &tracking()).require_grad()),
    Positions: past_the_last_position(),
    Record: a_record_of_another_shape(),
    TooLarge: slots(8, |o| o.keep_window = Some(1 << 40)),
    Engine: slots(8, |o| o.engine = EngineChoice::Only(Engine::Portable)),
    // Caches of pages.
    Shape: page_step(|c| c.q = zeros([2, 4, 2, 8])),
    HeadRatio: page_step(|c| c.q = zeros([2, 3, 3, 8])),
    ElementType: page_step(|c| c.v = c.v.clone().cast(DType::F16)),
    Device: page_step(|c| c.v = elsewhere([2, 2, 3, 8])),
    Tracked: page_step(|c| c.v = Tensor::zeros([2, 2, 3, 8], &tracking()).require_grad()),
    HeadDim: PagedCacheConfig::new(2, 2, 12, 8).try_init(&here()),
    EmptyPages: pages(|c| c.page_len = 0),
    CacheWindow: pages(|c| c.options.keep_window = Some(4)),
    CacheNotCausal: pages(|c| c.options.causal = false),
    CacheScores: page_step(|c| c.scored = true),
    PagesFull: page_step(|c| c.all_of_len(9)),
    PagesUsed: page_step(|c| c.all_of_len(8)),
    Sequence: pages(|_| {})?.try_reorder(&[0, 7]),
    Prefix: pages(|_| {})?.try_share_prefix(0, 1, 3),
    BlockTable: {
        pages(|_| {})?.try_set_block_table(&BlockTable {
            pages: vec![vec![1], vec![1]],
            lengths: vec![3, 3],
        })
    },
    NotHolding: pages(|_| {})?.try_accept(0),
    NoCaches: PagedCache::try_cat(Vec::new()),
    JoinedCaches: PagedCache::try_cat(vec![pages(|_| {})?, pages(|c| c.page_len = 2)?]),
    // Norms and rotary encoding.
    Shape: try_rms_norm(zeros([2, 3, 24]), zeros([16]), 1e-5),
    ElementType: try_rms_norm(zeros([2, 24]).cast(DType::BF16), zeros([24]).cast(DType::F16), 1e-5),
    ElementType: try_rms_norm(zeros([2, 24]).cast(DType::F64), zeros([24]), 1e-5),
    Device: try_rms_norm(zeros([2, 24]), elsewhere([24]), 1e-5),
    TooLarge: try_rms_norm(zeros([2, 8193]), zeros([8193]), 1e-5),
    Epsilon: try_rms_norm(zeros([2, 24]), zeros([24]), 0.0),
    Epsilon: heads(8).norm(zeros([8]), f32::NAN).try_forward(),
    Rotary: layer().with_rope(Some(Rope::new(0))).try_init(&here()),
    HeadDim: heads(12).try_forward(),
    Shape: heads(8).rotary(zeros([9, 16, 2]), 0).try_forward(),
    TooLarge: heads(8).rotary(zeros([9, 8, 2]), 7).try_forward(),
    Device: heads(8).rotary(elsewhere([9, 8, 2]), 0).try_forward(),
    SecondOrder: second_norm(),
    // The engines' own functions, which take buffers.
    Rank: Problem::new(&[2, 4, 8], &KV, &KV, None, ElementType::F32, &causal()),
    Strides: select_view([14, 7, 2], 28),
    Buffer: select_view([14, 7, 1], 20),
    ScoresWithoutIntervals: backward(false, true, false),
    ScoresGradient: backward(true, false, false),
    RankGradient: backward(true, true, true),
    Residual: a_residual_of_f32(),
    BiasGradient: a_gradient_of_no_bias(),
    NormOperand: a_norm_without_weight(),
    Engine: kernels::run(Engine::Wgmma),
    Unsupported: {
        let problem = Problem::new(&KV, &KV, &KV, None, ElementType::F32, &causal())?;
        required_bytes(&problem, Passes::Forward, &here())
    },
    DeviceFailed: kernels::run(Engine::Portable),
    Grid: check_grid([1, 70_000, 1], [65535; 3]),
    Group: a_group_without_time(),
}

#[test]
fn every_refusal_has_its_error() {
    let mut provoked = BTreeSet::new();
    for (row, (kind, call)) in TABLE.iter().enumerate() {
        match call() {
            Err(error) => assert_eq!(error.kind(), *kind, "row {row}: {error}"),
            Ok(()) => panic!("row {row}: what {kind} refuses was taken"),
        }
        provoked.insert(*kind);
    }
    let all: BTreeSet<&str> = AttentionError::KINDS.iter().copied().collect();
    // Every backend of this build has an engine: the module `engines` of the extension provokes this one.
    provoked.insert("NoEngine");
    let missing: Vec<_> = all.difference(&provoked).collect();
    assert!(missing.is_empty(), "no call of the table gives {missing:?}");
}

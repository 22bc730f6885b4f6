//! Every variant of `AttentionError`, provoked through the public API: one table, which is complete or fails.

mod buffers;
mod calls;

use buffers::{
    a_gradient_of_no_bias, a_gradient_of_no_runners_up, a_norm_without_weight, a_residual_of_f32,
    backward, failed_launch, select_view, wgmma_on_a_cpu,
};
use burn::tensor::{DType, Int, Tensor};
use burn_flash_dma::cache::{BlockTable, DynamicMaskCache, PagedCache, PagedCacheConfig};
use burn_flash_dma::engines::{Engine, EngineChoice};
use burn_flash_dma::memory::{Passes, required_bytes};
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, RoundRobin};
use burn_flash_dma::{
    AlibiSlopes, AttentionError, Documents, Dropout, ElementType, HeadEncoding, Intervals,
    KeyRanges, LeaveOneOut, Problem, RankSoftmax, Selector, try_merge_attention, try_rms_norm,
    try_select, try_sliding_window,
};
use calls::{
    Call, KV, a_record_of_another_shape, by_selector, causal, dense, dynamic, elsewhere,
    given_pairs, here, masked, page_step, pages, past_the_last_position, ranges_on_two_devices,
    second_norm, second_order, select_by, shows, slots, slots_that_keep, step, tracking, waiting,
    with_intervals, with_plan, zeros,
};
use flash_dma_problem::check_grid;
use std::collections::BTreeSet;

/// The operation, the expected error, and the call.
type Row = (Operation, &'static str, fn() -> Result<(), AttentionError>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Dense,
    Dynamic,
    Masked,
    Slots,
    Pages,
    Norm,
    /// The engines' own functions, which take buffers.
    Buffers,
}
use Operation::{Buffers, Dense, Dynamic, Masked, Norm, Pages, Slots};

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
    (Dense, "DropoutRate", || Dropout::new(1.0, 0).map(drop)),
    (Dense, "AlibiSlope", || {
        AlibiSlopes::new(&[f32::NAN]).map(drop)
    }),
    (Dense, "AlibiHeads", || {
        dense(|c| c.options.alibi = Some(AlibiSlopes::standard(2)))
    }),
    (Dense, "TooLarge", || dense(Call::past_every_address)),
    (Dense, "NoParts", || try_merge_attention([]).map(drop)),
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
    (Dynamic, "WindowParts", || {
        select_by(&Selector::top(4).recent(3).sinks(2))
    }),
    (Dynamic, "WindowParts", || {
        select_by(&Selector::top(vec![9, 4]).recent(5))
    }),
    (Dynamic, "PartsWithoutWindow", || {
        let config = DynamicMaskAttentionConfig::new(16, 2).with_sinks(Some(1));
        config.try_init(&here()).map(drop)
    }),
    (Dynamic, "ZeroWindow", || {
        select_by(&Selector::top(vec![3, 0]))
    }),
    (Dynamic, "ZeroWindow", || {
        try_sliding_window([2, 2, 7], 0, &here()).map(drop)
    }),
    (Dynamic, "HeadWindows", || {
        select_by(&Selector::top(vec![3, 4, 5]))
    }),
    (Dynamic, "SelectionNotCausal", || {
        by_selector(Selector::top(4).recent(1), |c| c.options.causal = false)
    }),
    (Dynamic, "SelectionNotCausal", || {
        by_selector(Selector::top(4).sinks(1), |c| c.options.causal = false)
    }),
    (Dynamic, "SelectionNotCausal", || {
        let documents = Documents::from_lengths([vec![7], vec![7]]);
        by_selector(Selector::top(4).documents(documents), |c| {
            c.options.causal = false;
        })
    }),
    (Dynamic, "DocumentQueries", || {
        let documents = Documents::from_lengths([vec![7], vec![3, 4]]);
        by_selector(Selector::top(4).documents(documents), |_| {})
    }),
    (Dynamic, "DocumentBatch", || {
        let documents = Documents::from_lengths([vec![7]]);
        select_by(&Selector::top(4).documents(documents))
    }),
    (Dynamic, "DocumentTokens", || {
        let documents = Documents::from_lengths([vec![7], vec![3, 5]]);
        select_by(&Selector::top(4).documents(documents))
    }),
    (Dynamic, "DocumentBatch", || {
        let documents = Documents::from_lengths([vec![7]]);
        documents.try_intervals([2, 2, 7], &here()).map(drop)
    }),
    (Dynamic, "TooLarge", || {
        Documents::try_from_padded([7, 8], 7).map(drop)
    }),
    (Dynamic, "CumulativeLengths", || {
        Documents::try_from_cu_seqlens(&[1, 4]).map(drop)
    }),
    (Dynamic, "CumulativeLengths", || {
        Documents::try_from_cu_seqlens(&[0, 4, 3]).map(drop)
    }),
    (Dynamic, "IntervalBounds", || given_pairs([[0, 2], [0, 2]])),
    (Dynamic, "IntervalBounds", || given_pairs([[0, 2], [1, 0]])),
    (Dynamic, "IntervalBounds", || given_pairs([[0, 3], [1, 2]])),
    (Dynamic, "Shape", || {
        let triples = Tensor::<4, Int>::zeros([1, 1, 2, 3], &here());
        Intervals::try_from_tensor(triples).map(drop)
    }),
    (Dynamic, "Scale", || {
        dynamic(|c| c.options.scale = Some(f32::NAN))
    }),
    (Dynamic, "Softcap", || {
        dynamic(|c| c.options.softcap = Some(-1.0))
    }),
    (Dynamic, "TooLarge", || dynamic(Call::past_every_address)),
    (Dynamic, "RecencySlope", || {
        let config = DynamicMaskAttentionConfig::new(16, 2).with_recency_slope(Some(-1.0));
        config.try_init(&here()).map(drop)
    }),
    (Dynamic, "RoundRobin", || {
        let config = DynamicMaskAttentionConfig::new(16, 2);
        let none = config.with_round_robin(Some(RoundRobin::new(0, 9.0)));
        none.try_init(&here()).map(drop)
    }),
    (Dynamic, "LeaveOneOut", || LeaveOneOut::new(0.0).map(drop)),
    (Dynamic, "RankSoftmax", || RankSoftmax::new(-1.0).map(drop)),
    (Dynamic, "GradientScale", || {
        let config = DynamicMaskAttentionConfig::new(16, 2).with_token_gradient_scale(Some(-1.0));
        config.try_init(&here()).map(drop)
    }),
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
    (Masked, "DocumentCounts", || {
        let [queries, keys] = [vec![5], vec![3, 4]].map(|own| Documents::from_lengths([own]));
        KeyRanges::try_packed([&queries, &keys], true, &here()).map(drop)
    }),
    (Masked, "DocumentBatch", || {
        let queries = Documents::from_lengths([vec![5], vec![5]]);
        let keys = Documents::from_lengths([vec![7]]);
        KeyRanges::try_packed([&queries, &keys], true, &here()).map(drop)
    }),
    (Masked, "MaskedSelection", || {
        let layer = DynamicMaskAttentionConfig::new(16, 2).init(&here());
        let input = DynamicMaskInput::new(zeros([1, 5, 16])).mask(shows([1, 1, 5, 5]));
        layer.try_selection(input).map(drop)
    }),
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
    (Slots, "WindowParts", || {
        slots_that_keep(Some(3), Some(2)).map(drop)
    }),
    (Slots, "WindowParts", || {
        slots_that_keep(Some(5), None).map(drop)
    }),
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
    (Slots, "CacheDropout", || {
        slots(8, |o| o.dropout = Dropout::new(0.1, 0).ok()).map(drop)
    }),
    (Slots, "CacheAlibi", || {
        slots(8, |o| o.alibi = Some(AlibiSlopes::standard(4))).map(drop)
    }),
    (Slots, "Sequence", || slots(8, |_| {})?.try_reorder(&[0, 2])),
    (Slots, "TokensWait", || waiting()?.try_reset(0)),
    (Slots, "TooManyAccepted", || waiting()?.try_accept(4)),
    (Slots, "NotHolding", || slots(8, |_| {})?.try_accept(0)),
    (Slots, "NoCaches", || {
        DynamicMaskCache::try_cat(Vec::new()).map(drop)
    }),
    (Slots, "JoinedCaches", || {
        let other = slots(8, |o| o.keep_window = Some(5))?;
        DynamicMaskCache::try_cat(vec![slots(8, |_| {})?, other]).map(drop)
    }),
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
    (Pages, "Prefix", || pages(|_| {})?.try_share_prefix(0, 1, 3)),
    (Pages, "BlockTable", || {
        pages(|_| {})?.try_set_block_table(&BlockTable {
            pages: vec![vec![1], vec![1]],
            lengths: vec![3, 3],
        })
    }),
    (Pages, "NotHolding", || pages(|_| {})?.try_accept(0)),
    (Pages, "NoCaches", || {
        PagedCache::try_cat(Vec::new()).map(drop)
    }),
    (Pages, "JoinedCaches", || {
        PagedCache::try_cat(vec![pages(|_| {})?, pages(|c| c.page_len = 2)?]).map(drop)
    }),
    (Norm, "Shape", || {
        try_rms_norm(zeros([2, 3, 24]), zeros([16]), 1e-5).map(drop)
    }),
    (Norm, "ElementType", || {
        try_rms_norm(zeros([2, 24]), zeros([24]).cast(DType::F16), 1e-5).map(drop)
    }),
    (Norm, "ElementType", || {
        try_rms_norm(zeros([2, 24]).cast(DType::F64), zeros([24]), 1e-5).map(drop)
    }),
    (Norm, "Device", || {
        try_rms_norm(zeros([2, 24]), elsewhere([24]), 1e-5).map(drop)
    }),
    (Norm, "TooLarge", || {
        try_rms_norm(zeros([2, 8193]), zeros([8193]), 1e-5).map(drop)
    }),
    (Norm, "Epsilon", || {
        try_rms_norm(zeros([2, 24]), zeros([24]), 0.0).map(drop)
    }),
    (Norm, "Epsilon", || {
        let heads = HeadEncoding::new(zeros([2, 3, 4, 8]));
        heads.norm(zeros([8]), f32::NAN).try_forward().map(drop)
    }),
    (Norm, "Rotary", || {
        let config = DynamicMaskAttentionConfig::new(16, 2).with_max_seq_len(Some(0));
        config.try_init(&here()).map(drop)
    }),
    (Norm, "HeadDim", || {
        HeadEncoding::new(zeros([2, 3, 4, 12]))
            .try_forward()
            .map(drop)
    }),
    (Norm, "Shape", || {
        let heads = HeadEncoding::new(zeros([2, 3, 4, 8]));
        heads.rotary(zeros([9, 16, 2]), 0).try_forward().map(drop)
    }),
    (Norm, "TooLarge", || {
        let heads = HeadEncoding::new(zeros([2, 3, 4, 8]));
        heads.rotary(zeros([9, 8, 2]), 7).try_forward().map(drop)
    }),
    (Norm, "Device", || {
        let heads = HeadEncoding::new(zeros([2, 3, 4, 8]));
        heads
            .rotary(elsewhere([9, 8, 2]), 0)
            .try_forward()
            .map(drop)
    }),
    (Norm, "SecondOrder", second_norm),
    (Dense, "WholeSequence", || {
        let layer = MultiHeadAttentionConfig::new(16, 2).init(&here());
        let mut cache = MhaCache::autoregressive();
        let mut read = || {
            let input = MhaInput::self_attn(zeros([1, 3, 16]));
            layer.try_forward_cache(input, &mut cache).map(drop)
        };
        read()?;
        read()
    }),
    (Buffers, "Rank", || {
        Problem::new(&[2, 4, 8], &KV, &KV, None, ElementType::F32, &causal()).map(drop)
    }),
    (Buffers, "Strides", || select_view([14, 7, 2], 28)),
    (Buffers, "Buffer", || select_view([14, 7, 1], 20)),
    (Buffers, "ScoresWithoutIntervals", || backward(false, true)),
    (Buffers, "ScoresGradient", || backward(true, false)),
    (Buffers, "RankGradient", a_gradient_of_no_runners_up),
    (Buffers, "Residual", a_residual_of_f32),
    (Buffers, "BiasGradient", a_gradient_of_no_bias),
    (Buffers, "NormOperand", a_norm_without_weight),
    (Buffers, "Engine", wgmma_on_a_cpu),
    (Dense, "Engine", || {
        dense(|c| c.options.engine = EngineChoice::Only(Engine::Wgmma))
    }),
    (Masked, "Engine", || {
        masked(|c| c.options.engine = EngineChoice::Only(Engine::Wgmma))
    }),
    (Slots, "Engine", || {
        slots(8, |o| o.engine = EngineChoice::Only(Engine::Portable)).map(drop)
    }),
    (Buffers, "Unsupported", || {
        let problem = Problem::new(&KV, &KV, &KV, None, ElementType::F32, &causal())?;
        required_bytes(&problem, Passes::Forward, &here()).map(drop)
    }),
    (Buffers, "DeviceFailed", failed_launch),
    (Buffers, "Grid", || check_grid([1, 70_000, 1], [65535; 3])),
];

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
    // Every backend of this build has an engine: the module `engines` of the extension provokes this one.
    provoked.insert("NoEngine");
    let missing: Vec<_> = all.difference(&provoked).collect();
    assert!(missing.is_empty(), "no call of the table gives {missing:?}");
}

//! Calls of the functions on tensors, and of those that make masks and selections.

use super::draw::{Draw, Sizes};
use burn::nn::LinearConfig;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_flash_dma::cache::try_overwrite;
use burn_flash_dma::finite::{FiniteChecks, try_check_finite};
use burn_flash_dma::testing::{try_assert_causal, try_check_gradients};
use burn_flash_dma::train::{cross_entropy, embed, token_losses};
use burn_flash_dma::*;

/// q, k and v of an attention.
fn rows(draw: &mut Draw, sizes: &Sizes) -> [Tensor<4>; 3] {
    [
        draw.tensor("q", sizes.q()),
        draw.tensor("k", sizes.kv()),
        draw.tensor("v", sizes.kv()),
    ]
}

/// f32 or the type of the case.
fn score_type(draw: &mut Draw) -> DType {
    let dtype = draw.dtype;
    draw.pick(&[DType::F32, dtype])
}

fn scores(draw: &mut Draw, sizes: &Sizes) -> Tensor<3> {
    let dtype = score_type(draw);
    draw.tensor_in("scores", sizes.scores(), dtype)
}

pub fn attention(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [q, k, v] = rows(draw, &sizes);
    let options = draw.options(sizes.q_heads, false);
    forward(draw, Attention::new(q, k, v).options(options), &sizes);
}

/// A call of a builder, in one of the forms that all have.
macro_rules! form {
    ($draw:ident, $attention:ident, $sizes:ident) => {
        match $draw.below(3) {
            0 => finish!($draw, $attention.try_forward()),
            1 => finish!($draw, $attention.try_forward_with_lse()),
            _ => {
                let rows = chosen($draw, $sizes.q_len);
                finish!($draw, $attention.try_probabilities(&rows));
            }
        }
    };
}

fn forward<S: Clone>(draw: &mut Draw, attention: Attention<S>, sizes: &Sizes) {
    if !draw.one_in(4) {
        return form!(draw, attention, sizes);
    }
    let logits = draw.tensor_in("logits", [sizes.q_heads], DType::F32);
    finish!(draw, attention.try_forward_with_sink(logits));
}

/// The indices of some queries.
fn chosen(draw: &mut Draw, len: usize) -> Vec<usize> {
    let rows = (0..draw.below(4)).map(|_| match draw.one_in(30) {
        true => draw.end("row"),
        false => draw.below(len.max(1)),
    });
    let rows = rows.collect();
    draw.note(&rows);
    rows
}

pub fn scored_attention(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [q, k, v] = rows(draw, &sizes);
    let scores = scores(draw, &sizes);
    let options = draw.options(sizes.q_heads, true);
    if draw.one_in(3) {
        return finish!(draw, try_dynamic_mask_attention(q, k, v, scores, options));
    }
    let attention = Attention::new(q, k, v);
    if draw.one_in(3) {
        return forward(draw, attention.scores(scores).options(options), &sizes);
    }
    let Some(intervals) = selected(draw, &sizes, scores.clone()) else {
        return;
    };
    let attention = attention.options(options);
    match draw.one_in(2) {
        true => forward(draw, attention.intervals(&intervals), &sizes),
        false => forward(draw, attention.scores(scores).intervals(&intervals), &sizes),
    }
}

/// A selection of any kind.
fn selected(draw: &mut Draw, sizes: &Sizes, scores: Tensor<3>) -> Option<Intervals> {
    let intervals = match draw.below(5) {
        0 => {
            let window = draw.count("window");
            call!(draw, try_select(scores.clone(), window))
        }
        1 => {
            let (window, device) = (draw.count("window"), draw.device.clone());
            call!(draw, try_sliding_window(sizes.scores(), window, &device))
        }
        2 => {
            let documents = draw.documents(sizes.batch, sizes.k_len);
            let device = draw.device.clone();
            call!(draw, documents.try_intervals(sizes.scores(), &device))
        }
        _ => {
            let selector = selector(draw, sizes);
            call!(draw, selector.try_select(scores.clone()))
        }
    }?;
    if draw.one_in(3) {
        inspect(draw, &intervals, &scores);
    }
    Some(intervals)
}

fn selector(draw: &mut Draw, sizes: &Sizes) -> Selector {
    let window = match draw.one_in(4) {
        true => Window::PerHead((0..sizes.kv_heads).map(|_| draw.count("window")).collect()),
        false => Window::Uniform(draw.count("window")),
    };
    let mut selector = Selector::top(window);
    if draw.one_in(3) {
        selector = selector.recent(draw.count("recent"));
    }
    if draw.one_in(3) {
        selector = selector.sinks(draw.count("sinks"));
    }
    if draw.one_in(3) {
        selector = selector.documents(draw.documents(sizes.batch, sizes.k_len));
    }
    if draw.one_in(2) {
        selector = selector.runners_up(draw.count("runners-up"));
    }
    if draw.one_in(3) {
        selector = selector.leave_one_out(true);
    }
    if draw.one_in(3) {
        selector = selector.compete(true);
    }
    draw.note(&selector);
    selector
}

fn inspect(draw: &mut Draw, intervals: &Intervals, scores: &Tensor<3>) {
    let (position, queries) = (draw.end("position"), draw.len());
    let fits = scores.dims() == intervals.tensor().dims()[..3] && scores.dtype() != DType::F64;
    draw.run("inspecting intervals", || {
        let _ = intervals.live_at(position).into_data();
        let _ = intervals.as_mask(queries).into_data();
        let _ = (intervals.lifetimes().into_data(), intervals.stats());
        if fits {
            let _ = intervals.tie_rate(scores);
        }
    });
}

pub fn zoh_scores(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [_, _, v] = rows(draw, &sizes);
    let width = sizes.kv_heads * sizes.dim;
    let dt_proj = draw.tensor("dt_proj", [sizes.kv_heads, width]);
    let a = draw.tensor("a", [sizes.kv_heads]);
    finish!(draw, try_zoh_scores(v, dt_proj, a));
}

pub fn masked_attention(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [q, k, v] = rows(draw, &sizes);
    let shape = draw.broadcast(&sizes);
    let mask = draw.maybe(|draw| draw.mask(shape));
    let shape = draw.broadcast(&sizes);
    let dtype = score_type(draw);
    let bias = draw.maybe(|draw| draw.tensor_in("bias", shape, dtype));
    let options = draw.options(sizes.q_heads, false);
    let attention = MaskedAttention::new(q, k, v);
    let attention = match draw.one_in(2) {
        true => attention.mask(mask),
        false => match plan(draw, &sizes, options.causal) {
            Some(plan) => attention.plan(&plan),
            None => return,
        },
    };
    let attention = attention.bias(bias).options(options);
    form!(draw, attention, sizes);
}

/// A plan of a mask or of ranges, mostly for the right lengths and causal masking.
fn plan(draw: &mut Draw, sizes: &Sizes, causal: bool) -> Option<TilePlan> {
    let causal = causal != draw.one_in(20);
    let lengths = [sizes.q_len, sizes.k_len];
    if draw.one_in(2) {
        let shape = draw.broadcast(sizes);
        let mask = built_mask(draw, sizes, shape)?;
        return call!(draw, TilePlan::try_new(mask, lengths, causal));
    }
    let ranges = ranges(draw, sizes)?;
    call!(draw, TilePlan::try_from_ranges(ranges, lengths, causal))
}

fn built_mask(draw: &mut Draw, sizes: &Sizes, shape: [usize; 4]) -> Option<AttentionMask> {
    let (lengths, device) = ([sizes.q_len, sizes.k_len], draw.device.clone());
    let mask = match draw.below(6) {
        0 => run!(draw, AttentionMask::causal(lengths, &device)),
        1 => {
            let window = draw.end("window");
            run!(
                draw,
                AttentionMask::sliding_window(lengths, window, &device)
            )
        }
        2 => {
            let ends = draw.ints("lengths", [sizes.batch], sizes.k_len + 2);
            run!(draw, AttentionMask::padding(ends, sizes.k_len))
        }
        3 => {
            let ids = draw.ints("ids", [sizes.batch, sizes.k_len], 3);
            run!(draw, AttentionMask::documents(ids))
        }
        4 => {
            let [batch, heads, _, k_len] = shape;
            let bias = draw.tensor("bias", [batch, heads, sizes.q_len, k_len]);
            let (window, [_, _, q_len, _]) = (draw.end("window").max(1), bias.dims());
            run!(draw, AttentionMask::top(bias, window, q_len, None))
        }
        _ => Some(draw.mask(shape)),
    }?;
    let block = draw.end("block").max(1);
    let rule = draw.pick(&[BlockRule::Any, BlockRule::Majority]);
    match draw.one_in(3) {
        true => run!(draw, mask.in_key_blocks(block, rule)),
        false => Some(mask),
    }
}

fn ranges(draw: &mut Draw, sizes: &Sizes) -> Option<KeyRanges> {
    let (lengths, device) = ([sizes.q_len, sizes.k_len], draw.device.clone());
    match draw.below(5) {
        0 => {
            let shape = [sizes.batch, 1, sizes.q_len];
            let first = draw.ints("first", shape, sizes.k_len + 2);
            let end = draw.ints("end", shape, sizes.k_len + 2);
            run!(draw, KeyRanges::new(first, end))
        }
        1 => {
            let window = draw.end("window");
            run!(draw, KeyRanges::sliding_window(lengths, window, &device))
        }
        2 => {
            let ends = draw.ints("lengths", [sizes.batch], sizes.k_len + 2);
            run!(draw, KeyRanges::padding(ends))
        }
        3 => {
            let ids = draw.ints("ids", [sizes.batch, sizes.q_len], 3);
            run!(draw, KeyRanges::documents(ids))
        }
        _ => {
            let queries = draw.documents(sizes.batch, sizes.q_len);
            let keys = draw.documents(sizes.batch, sizes.k_len);
            let (both, causal) = ([&queries, &keys], draw.one_in(2));
            call!(draw, KeyRanges::try_packed(both, causal, &device))
        }
    }
}

pub fn masks(draw: &mut Draw) {
    let sizes = draw.sizes();
    if let Some(plan) = plan(draw, &sizes, true) {
        draw.run("reading a plan", || {
            drop((plan.counts().to_data(), plan.bits().to_data()));
        });
    }
}

pub fn packed_attention(draw: &mut Draw) {
    let sizes = draw.sizes();
    let q = draw.tensor("q", [sizes.q_len, sizes.q_heads, sizes.dim]);
    let [k, v] = ["k", "v"].map(|name| draw.tensor(name, [sizes.k_len, sizes.kv_heads, sizes.dim]));
    let documents = draw.documents(1, sizes.k_len);
    let attention = PackedAttention::new(q, k, v, &documents);
    let scored = draw.one_in(2);
    let options = draw.options(sizes.q_heads, scored);
    if scored {
        let dtype = score_type(draw);
        let scores = draw.tensor_in("scores", [sizes.k_len, sizes.kv_heads], dtype);
        let mut attention = attention.scores(scores).options(options);
        if draw.one_in(3) {
            attention = attention.selector(selector(draw, &sizes));
        }
        return form!(draw, attention, sizes);
    }
    let attention = attention.options(options);
    if draw.one_in(3) {
        return form!(draw, attention, sizes);
    }
    let of_one = Sizes { batch: 1, ..sizes };
    let queries = draw.documents(1, sizes.q_len);
    let mut attention = attention.query_documents(&queries);
    if draw.one_in(2) {
        let shape = draw.broadcast(&of_one);
        attention = attention.mask(draw.mask(shape));
    }
    if draw.one_in(2) {
        let shape = draw.broadcast(&of_one);
        attention = attention.bias(draw.tensor("bias", shape));
    }
    form!(draw, attention, sizes);
}

pub fn given_intervals(draw: &mut Draw) {
    let [batch, heads, len] = draw.sizes().scores();
    if draw.one_in(2) {
        let mut ends = draw.ints("ends", [batch, heads, len], len + 1);
        // Mostly no end before its key.
        if !draw.one_in(8) && !ends.dims().contains(&0) {
            let shape @ [_, _, len] = ends.dims();
            let keys = Tensor::<1, Int>::arange(0..len as i64, (&ends.device(), ends.dtype()));
            ends = ends.max_pair(keys.reshape([1, 1, len]).expand(shape));
        }
        call!(draw, Intervals::try_from_ends(ends));
        return;
    }
    let pairs = draw.ints("pairs", [batch, heads, len, 2], len + 2);
    call!(draw, Intervals::try_from_tensor(pairs));
}

pub fn documents(draw: &mut Draw) {
    let len = draw.end("len");
    let count = draw.below(4);
    let mut numbers: Vec<usize> = (0..count).map(|_| draw.end("length")).collect();
    call!(draw, Documents::try_from_padded(numbers.clone(), len));
    if !draw.one_in(4) {
        numbers.sort_unstable();
        numbers.insert(0, 0);
    }
    if let Some(documents) = call!(draw, Documents::try_from_cu_seqlens(&numbers)) {
        let shape = [draw.batch(), 2, draw.len()];
        let device = draw.device.clone();
        call!(draw, documents.try_intervals(shape, &device));
        let all = [&documents, &documents];
        call!(draw, KeyRanges::try_packed(all, true, &device));
    }
}

pub fn selections(draw: &mut Draw) {
    let sizes = draw.sizes();
    let scores = scores(draw, &sizes);
    selected(draw, &sizes, scores);
}

pub fn packed_tensors(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [batch, kv_heads, k_len, dim] = sizes.kv();
    let qkv = draw.tensor("qkv", [batch, k_len, 3, kv_heads, dim]);
    let kv = draw.tensor("kv", [batch, k_len, 2, kv_heads, dim]);
    let q = draw.tensor("q", sizes.q());
    match draw.below(6) {
        0 => finish!(draw, try_split_qkv(qkv)),
        1 => finish!(draw, try_split_kv(kv)),
        2 => {
            call!(draw, Attention::try_from_qkv(qkv));
        }
        3 => {
            call!(draw, Attention::try_from_q_kv(q, kv));
        }
        4 => {
            call!(draw, MaskedAttention::try_from_qkv(qkv));
        }
        _ => {
            call!(draw, MaskedAttention::try_from_q_kv(q, kv));
        }
    }
}

pub fn heads(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [batch, q_heads, q_len, dim] = sizes.q();
    let kv_heads = sizes.kv_heads;
    let parts = match draw.one_in(10) {
        true => [0, usize::MAX, 1],
        false => [q_heads, kv_heads, draw.pick(&[kv_heads, kv_heads, 0])],
    };
    draw.note(parts);
    let all = parts.iter().fold(0usize, |sum, &n| sum.wrapping_add(n));
    let x = draw.tensor("x", [batch, q_len, all, dim]);
    finish!(draw, try_split_heads(x, parts));
}

pub fn parts(draw: &mut Draw) {
    let sizes = draw.sizes();
    let out = draw.tensor("out", sizes.q());
    let lse = draw.tensor_in("lse", sizes.lse(), DType::F32);
    if draw.one_in(2) {
        let logits = draw.tensor_in("logits", [sizes.q_heads], DType::F32);
        return finish!(draw, try_learnable_sink(out, lse, logits));
    }
    let mut parts = vec![(out, lse)];
    for _ in 0..draw.below(3) {
        let out = draw.tensor("out", sizes.q());
        parts.push((out, draw.tensor_in("lse", sizes.lse(), DType::F32)));
    }
    if draw.one_in(10) {
        parts.clear();
    }
    finish!(draw, try_merge_attention(parts));
}

pub fn products(draw: &mut Draw) {
    let [d_in, d_out] = [0; 2].map(|_| draw.pick(&[0, 1, 3, 8, 16]));
    let (batch, len) = (draw.batch(), draw.len());
    let x = draw.tensor("x", [batch, len, d_in]);
    let rows = draw.tensor("x", [len, d_in]);
    let weight = draw.tensor("weight", [d_in, d_out]);
    match draw.below(3) {
        0 => finish!(draw, try_product(x, weight)),
        1 => finish!(draw, try_product(rows, weight)),
        _ => {
            let [d_in, d_out] = weight.dims().map(|size| size.max(1));
            let bias = draw.one_in(2);
            let config = LinearConfig::new(d_in, d_out).with_bias(bias);
            let mut layer = config.init(&draw.device);
            if !draw.one_in(3) {
                let dtype = draw.dtype;
                layer.weight = layer.weight.map(|weight| weight.cast(dtype));
                layer.bias = layer.bias.map(|bias| bias.map(|bias| bias.cast(dtype)));
            }
            draw.note(("layer", d_in, d_out, layer.weight.val().dtype()));
            finish!(draw, try_linear(&layer, x));
        }
    }
}

pub fn gates_and_scores(draw: &mut Draw) {
    let (batch, len) = (draw.batch(), draw.len());
    let width = draw.pick(&[0, 1, 8, 16]);
    if draw.one_in(2) {
        let [gate, up] = ["gate", "up"].map(|name| draw.tensor(name, [batch, len, width]));
        if draw.one_in(2) {
            return finish!(draw, try_swiglu(gate, up));
        }
        let d_in = draw.pick(&[width.max(1), 8]);
        let config = LinearConfig::new(d_in, 8).with_bias(draw.one_in(2));
        let layer = config.init(&draw.device);
        draw.note(("layer", d_in));
        return finish!(draw, try_swiglu_linear(gate, up, &layer));
    }
    let tokens = draw.tensor("tokens", [batch, len, width]);
    let heads = draw.pick(&[0, 1, 2]);
    let score_proj = draw.tensor("score_proj", [width, heads]);
    finish!(draw, try_linear_scores(tokens, score_proj));
}

pub fn norms(draw: &mut Draw) {
    let [batch, q_heads, q_len, dim] = draw.sizes().q();
    let epsilon = draw.number("epsilon", &[1e-5, 1.0]) as f32;
    if draw.one_in(2) {
        let width = draw.pick(&[0, 1, 8, 24, 8193]);
        let x = draw.tensor("x", [batch.min(1), q_len.min(2), width]);
        let gamma = draw.tensor("gamma", [width]);
        if draw.one_in(2) {
            return finish!(draw, try_rms_norm_branch(x, gamma, epsilon));
        }
        return finish!(draw, try_rms_norm(x, gamma, epsilon));
    }
    let x = draw.tensor("x", [batch, q_len, q_heads, dim]);
    let mut encoding = HeadEncoding::new(x);
    if draw.one_in(2) {
        encoding = encoding.norm(draw.tensor("gamma", [dim]), epsilon);
    }
    if draw.one_in(2) {
        let positions = draw.pick(&[0, 1, 20, 40]);
        let table = draw.tensor_in("table", [positions, dim, 2], DType::F32);
        let start = match draw.one_in(10) {
            true => draw.end("start"),
            false => 0,
        };
        encoding = encoding.rotary(table, start);
    }
    finish!(draw, encoding.try_forward());
}

pub fn checks(draw: &mut Draw) {
    let shape = [draw.batch(), draw.len(), draw.len()];
    let x = draw.tensor("x", shape);
    let step = draw.end("step");
    if draw.one_in(2) {
        call!(draw, try_check_finite(&x, "x", step));
        return;
    }
    let y = draw.tensor("y", [shape[1]]);
    let mut checks = FiniteChecks::new(step).hiding("y", &y);
    if draw.one_in(2) {
        checks = checks.tensor("x", &x);
    }
    call!(draw, checks.try_check());
}

pub fn overwritten(draw: &mut Draw) {
    let shape = [draw.batch(), draw.len()];
    let tokens = draw.ints("tokens", shape, 9);
    let count = tokens.shape().num_elements() + usize::from(draw.one_in(8));
    let values = vec![1; count];
    if let Some(tokens) = call!(draw, try_overwrite(tokens, &values)) {
        draw.run("reading a result", || drop(tokens.into_data()));
    }
}

pub fn causality(draw: &mut Draw) {
    let (batch, len) = (draw.batch(), draw.len());
    let width = draw.pick(&[0, 1, 3]);
    let tolerance = draw.number("tolerance", &[1e-5, 1e-2]);
    let leaks = draw.one_in(3);
    let x = draw.tensor("x", [batch, len, width]);
    let model = |x: Tensor<3>| match leaks && !x.dims().contains(&0) {
        true => x.flip([1]),
        false => x,
    };
    call!(draw, try_assert_causal(model, x, tolerance));
}

pub fn gradients(draw: &mut Draw) {
    let mut sizes = draw.sizes();
    (sizes.q_len, sizes.k_len) = (sizes.q_len.min(5), sizes.k_len.min(5));
    let scored = draw.one_in(2);
    let options = draw.options(sizes.q_heads, scored);
    let element = draw.pick(&[ElementType::F32, ElementType::F16, ElementType::Bf16]);
    let (q, kv) = (sizes.q(), sizes.kv());
    let scores = scored.then_some(&kv[..3]);
    if let Some(problem) = call!(draw, Problem::new(&q, &kv, &kv, scores, element, &options)) {
        let device = draw.device.clone();
        call!(draw, try_check_gradients(&problem, &device));
    }
}

pub fn losses(draw: &mut Draw) {
    let (tokens, classes) = (draw.len(), draw.pick(&[1, 2, 9]));
    let dtype = draw.pick(&[DType::F32, DType::F16, DType::BF16]);
    let logits = draw.tensor_in("logits", [tokens, classes], dtype);
    let [tokens, classes] = logits.dims();
    let targets = draw.ints("targets", [tokens], classes);
    if classes > 0 && targets.dims() == [tokens] {
        let loss = run!(draw, cross_entropy(logits.clone(), targets.clone()));
        draw.finish(loss);
        let losses = run!(draw, token_losses(logits, targets));
        draw.finish(losses);
    }
    let table = burn::nn::EmbeddingConfig::new(5, 3).init(&draw.device);
    let (batch, len) = (draw.batch(), draw.len());
    let tokens = draw.ints("tokens", [batch, len], 5);
    let dtype = draw.pick(&[FloatDType::F32, FloatDType::BF16]);
    let rows = run!(draw, embed(&table, tokens, dtype));
    draw.finish(rows);
}

//! Calls of the functions on tensors, and of what makes masks and selections.

use super::draw::{Draw, Sizes};
use burn::nn::LinearConfig;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_flash_dma::finite::{FiniteChecks, try_check_finite};
use burn_flash_dma::testing::{try_assert_causal, try_check_gradients};
use burn_flash_dma::train::{cross_entropy, embed, token_losses};
use burn_flash_dma::*;

/// The three rows of an attention.
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
    if draw.one_in(3) {
        let out = draw.call("try_attention", || try_attention(q, k, v, options));
        return draw.finish(out);
    }
    forward(draw, Attention::new(q, k, v).options(options), &sizes);
}

/// A call of the builder, in one of its forms.
fn forward<S: Clone>(draw: &mut Draw, attention: Attention<S>, sizes: &Sizes) {
    match draw.below(4) {
        0 => {
            let out = draw.call("Attention::try_forward", || attention.try_forward());
            draw.finish(out);
        }
        1 => {
            let logits = draw.tensor_in("logits", [sizes.q_heads], DType::F32);
            let out = draw.call("Attention::try_forward_with_sink", || {
                attention.try_forward_with_sink(logits)
            });
            draw.finish(out);
        }
        2 => {
            let out = draw.call("Attention::try_forward_with_lse", || {
                attention.try_forward_with_lse()
            });
            draw.finish(out);
        }
        _ => {
            let rows = chosen(draw, sizes.q_len);
            let out = draw.call("Attention::try_probabilities", || {
                attention.try_probabilities(&rows)
            });
            draw.finish(out);
        }
    }
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
        let out = draw.call("try_dynamic_mask_attention", || {
            try_dynamic_mask_attention(q, k, v, scores, options)
        });
        return draw.finish(out);
    }
    let attention = Attention::new(q, k, v);
    if draw.one_in(3) {
        return forward(draw, attention.scores(scores).options(options), &sizes);
    }
    let Some(intervals) = selected(draw, &sizes, scores.clone()) else {
        return;
    };
    match draw.one_in(2) {
        true => {
            let attention = attention.intervals(&intervals).options(options);
            forward(draw, attention, &sizes);
        }
        false => {
            let attention = attention.scores(scores).intervals(&intervals);
            forward(draw, attention.options(options), &sizes);
        }
    }
}

/// A selection of any kind.
fn selected(draw: &mut Draw, sizes: &Sizes, scores: Tensor<3>) -> Option<Intervals> {
    let intervals = match draw.below(5) {
        0 => {
            let window = draw.count("window");
            draw.call("try_select", || try_select(scores.clone(), window))
        }
        1 => {
            let (window, device) = (draw.count("window"), draw.device.clone());
            draw.call("try_sliding_window", || {
                try_sliding_window(sizes.scores(), window, &device)
            })
        }
        2 => {
            let documents = draw.documents(sizes.batch, sizes.k_len);
            let device = draw.device.clone();
            draw.call("Documents::try_intervals", || {
                documents.try_intervals(sizes.scores(), &device)
            })
        }
        _ => {
            let selector = selector(draw, sizes);
            draw.call("Selector::try_select", || {
                selector.try_select(scores.clone())
            })
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
        let besides = draw.number("besides", &[0.05, 1.0]);
        selector = selector.leave_one_out(LeaveOneOut::new(besides).ok());
    }
    if draw.one_in(3) {
        let factor = draw.number("softmax", &[0.0, 1.0]);
        selector = selector.rank_softmax(RankSoftmax::new(factor).ok());
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

pub fn zoh_attention(draw: &mut Draw) {
    let sizes = draw.sizes();
    let [q, k, v] = rows(draw, &sizes);
    let width = sizes.kv_heads * sizes.dim;
    let dt_proj = draw.tensor("dt_proj", [sizes.kv_heads, width]);
    let a = draw.tensor("a", [sizes.kv_heads]);
    if draw.one_in(2) {
        let out = draw.call("try_zoh_scores", || try_zoh_scores(v, dt_proj, a));
        return draw.finish(out);
    }
    let options = draw.options(sizes.q_heads, true);
    let out = draw.call("try_flash_dma_attention", || {
        try_flash_dma_attention(q, k, v, dt_proj, a, options)
    });
    draw.finish(out);
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
    if draw.one_in(3) {
        let out = draw.call("try_masked_attention", || {
            try_masked_attention(q, k, v, mask, bias, options)
        });
        return draw.finish(out);
    }
    let attention = MaskedAttention::new(q, k, v);
    let attention = match draw.one_in(2) {
        true => attention.mask(mask),
        false => match plan(draw, &sizes, options.causal) {
            Some(plan) => attention.plan(&plan),
            None => return,
        },
    };
    let attention = attention.bias(bias).options(options);
    match draw.below(3) {
        0 => {
            let out = draw.call("MaskedAttention::try_forward", || attention.try_forward());
            draw.finish(out);
        }
        1 => {
            let out = draw.call("MaskedAttention::try_forward_with_lse", || {
                attention.try_forward_with_lse()
            });
            draw.finish(out);
        }
        _ => {
            let rows = chosen(draw, sizes.q_len);
            let out = draw.call("MaskedAttention::try_probabilities", || {
                attention.try_probabilities(&rows)
            });
            draw.finish(out);
        }
    }
}

/// A plan of a mask or of ranges, mostly for the lengths and the causal masking.
fn plan(draw: &mut Draw, sizes: &Sizes, causal: bool) -> Option<TilePlan> {
    let causal = causal != draw.one_in(20);
    let lengths = [sizes.q_len, sizes.k_len];
    if draw.one_in(2) {
        let shape = draw.broadcast(sizes);
        let mask = built_mask(draw, sizes, shape)?;
        return draw.call("TilePlan::try_new", || {
            TilePlan::try_new(mask, lengths, causal)
        });
    }
    let ranges = ranges(draw, sizes)?;
    draw.call("TilePlan::try_from_ranges", || {
        TilePlan::try_from_ranges(ranges, lengths, causal)
    })
}

fn built_mask(draw: &mut Draw, sizes: &Sizes, shape: [usize; 4]) -> Option<AttentionMask> {
    let (lengths, device) = ([sizes.q_len, sizes.k_len], draw.device.clone());
    let mask = match draw.below(6) {
        0 => draw.run("AttentionMask::causal", || {
            AttentionMask::causal(lengths, &device)
        }),
        1 => {
            let window = draw.end("window");
            draw.run("AttentionMask::sliding_window", || {
                AttentionMask::sliding_window(lengths, window, &device)
            })
        }
        2 => {
            let ends = draw.ints("lengths", [sizes.batch], sizes.k_len + 2);
            draw.run("AttentionMask::padding", || {
                AttentionMask::padding(ends, sizes.k_len)
            })
        }
        3 => {
            let ids = draw.ints("ids", [sizes.batch, sizes.k_len], 3);
            draw.run("AttentionMask::documents", || AttentionMask::documents(ids))
        }
        4 => {
            let [batch, heads, _, k_len] = shape;
            let bias = draw.tensor("bias", [batch, heads, sizes.q_len, k_len]);
            let (window, [_, _, q_len, _]) = (draw.end("window").max(1), bias.dims());
            draw.run("AttentionMask::top", || {
                AttentionMask::top(bias, window, q_len, None)
            })
        }
        _ => Some(draw.mask(shape)),
    }?;
    let block = draw.end("block").max(1);
    let rule = draw.pick(&[BlockRule::Any, BlockRule::Majority]);
    match draw.one_in(3) {
        true => draw.run("AttentionMask::in_key_blocks", || {
            mask.in_key_blocks(block, rule)
        }),
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
            draw.run("KeyRanges::new", || KeyRanges::new(first, end))
        }
        1 => {
            let window = draw.end("window");
            draw.run("KeyRanges::sliding_window", || {
                KeyRanges::sliding_window(lengths, window, &device)
            })
        }
        2 => {
            let ends = draw.ints("lengths", [sizes.batch], sizes.k_len + 2);
            draw.run("KeyRanges::padding", || KeyRanges::padding(ends))
        }
        3 => {
            let ids = draw.ints("ids", [sizes.batch, sizes.q_len], 3);
            draw.run("KeyRanges::documents", || KeyRanges::documents(ids))
        }
        _ => {
            let queries = draw.documents(sizes.batch, sizes.q_len);
            let keys = draw.documents(sizes.batch, sizes.k_len);
            let causal = draw.one_in(2);
            draw.call("KeyRanges::try_packed", || {
                KeyRanges::try_packed([&queries, &keys], causal, &device)
            })
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
        let mut attention = attention.scores(scores);
        if draw.one_in(3) {
            attention = attention.selector(selector(draw, &sizes));
        }
        return packed(draw, attention.options(options), &sizes);
    }
    if draw.one_in(3) {
        return packed(draw, attention.options(options), &sizes);
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
    packed(draw, attention.options(options), &sizes);
}

fn packed<S>(draw: &mut Draw, attention: PackedAttention<S>, sizes: &Sizes) {
    match draw.below(3) {
        0 => {
            let out = draw.call("PackedAttention::try_forward", || attention.try_forward());
            draw.finish(out);
        }
        1 => {
            let out = draw.call("PackedAttention::try_forward_with_lse", || {
                attention.try_forward_with_lse()
            });
            draw.finish(out);
        }
        _ => {
            let rows = chosen(draw, sizes.q_len);
            let out = draw.call("PackedAttention::try_probabilities", || {
                attention.try_probabilities(&rows)
            });
            draw.finish(out);
        }
    }
}

pub fn given_intervals(draw: &mut Draw) {
    let sizes = draw.sizes();
    let Sizes { k_len, .. } = sizes;
    if draw.one_in(2) {
        let shape = sizes.scores();
        let ends: Tensor<3, Int> = draw.ints("ends", shape, k_len + 1);
        // Mostly none before its key.
        let ends = match draw.one_in(8) || ends.dims().contains(&0) {
            true => ends,
            false => {
                let keys = ends.dims()[2] as i64;
                let keys = Tensor::<1, Int>::arange(0..keys, (&ends.device(), ends.dtype()));
                let [b, h, k] = ends.dims();
                ends.max_pair(keys.reshape([1, 1, k]).expand([b, h, k]))
            }
        };
        draw.call("Intervals::try_from_ends", || {
            Intervals::try_from_ends(ends)
        });
        return;
    }
    let [batch, heads, len] = sizes.scores();
    let pairs = draw.ints("pairs", [batch, heads, len, 2], k_len + 2);
    draw.call("Intervals::try_from_tensor", || {
        Intervals::try_from_tensor(pairs)
    });
}

pub fn documents(draw: &mut Draw) {
    let len = draw.end("len");
    let count = draw.below(4);
    let mut numbers: Vec<usize> = (0..count).map(|_| draw.end("length")).collect();
    draw.call("Documents::try_from_padded", || {
        Documents::try_from_padded(numbers.clone(), len)
    });
    if !draw.one_in(4) {
        numbers.sort_unstable();
        numbers.insert(0, 0);
    }
    let documents = draw.call("Documents::try_from_cu_seqlens", || {
        Documents::try_from_cu_seqlens(&numbers)
    });
    if let Some(documents) = documents {
        let shape = [draw.batch(), 2, draw.len()];
        let device = draw.device.clone();
        draw.call("Documents::try_intervals", || {
            documents.try_intervals(shape, &device)
        });
        let all = [&documents, &documents];
        draw.call("KeyRanges::try_packed", || {
            KeyRanges::try_packed(all, true, &device)
        });
    }
}

pub fn selections(draw: &mut Draw) {
    let sizes = draw.sizes();
    let scores = scores(draw, &sizes);
    selected(draw, &sizes, scores);
}

pub fn packed_tensors(draw: &mut Draw) {
    let Sizes {
        batch,
        kv_heads,
        q_heads,
        q_len,
        k_len,
        dim,
    } = draw.sizes();
    let qkv = draw.tensor("qkv", [batch, k_len, 3, kv_heads, dim]);
    let kv = draw.tensor("kv", [batch, k_len, 2, kv_heads, dim]);
    let q = draw.tensor("q", [batch, q_heads, q_len, dim]);
    match draw.below(6) {
        0 => {
            let parts = draw.call("try_split_qkv", || try_split_qkv(qkv));
            draw.finish(parts);
        }
        1 => {
            let parts = draw.call("try_split_kv", || try_split_kv(kv));
            draw.finish(parts);
        }
        2 => {
            draw.call("Attention::try_from_qkv", || Attention::try_from_qkv(qkv));
        }
        3 => {
            draw.call("Attention::try_from_q_kv", || {
                Attention::try_from_q_kv(q, kv)
            });
        }
        4 => {
            draw.call("MaskedAttention::try_from_qkv", || {
                MaskedAttention::try_from_qkv(qkv)
            });
        }
        _ => {
            draw.call("MaskedAttention::try_from_q_kv", || {
                MaskedAttention::try_from_q_kv(q, kv)
            });
        }
    }
}

pub fn heads(draw: &mut Draw) {
    let Sizes {
        batch,
        kv_heads,
        q_heads,
        q_len,
        dim,
        ..
    } = draw.sizes();
    let parts = match draw.one_in(10) {
        true => [0, usize::MAX, 1],
        false => [q_heads, kv_heads, draw.pick(&[kv_heads, kv_heads, 0])],
    };
    draw.note(parts);
    let all = parts.iter().fold(0usize, |sum, &n| sum.wrapping_add(n));
    let x = draw.tensor("x", [batch, q_len, all, dim]);
    let made = draw.call("try_split_heads", || try_split_heads(x, parts));
    draw.finish(made);
}

pub fn parts(draw: &mut Draw) {
    let sizes = draw.sizes();
    let out = draw.tensor("out", sizes.q());
    let lse = draw.tensor_in("lse", sizes.lse(), DType::F32);
    if draw.one_in(2) {
        let logits = draw.tensor_in("logits", [sizes.q_heads], DType::F32);
        let all = draw.call("try_learnable_sink", || {
            try_learnable_sink(out, lse, logits)
        });
        return draw.finish(all);
    }
    let mut parts = vec![(out, lse)];
    for _ in 0..draw.below(3) {
        let out = draw.tensor("out", sizes.q());
        parts.push((out, draw.tensor_in("lse", sizes.lse(), DType::F32)));
    }
    if draw.one_in(10) {
        parts.clear();
    }
    let all = draw.call("try_merge_attention", || try_merge_attention(parts));
    draw.finish(all);
}

pub fn products(draw: &mut Draw) {
    let [d_in, d_out] = [0; 2].map(|_| draw.pick(&[0, 1, 3, 8, 16]));
    let (batch, len) = (draw.batch(), draw.len());
    let x = draw.tensor("x", [batch, len, d_in]);
    let rows = draw.tensor("x", [len, d_in]);
    let weight = draw.tensor("weight", [d_in, d_out]);
    match draw.below(3) {
        0 => {
            let out = draw.call("try_product", || try_product(x, weight));
            draw.finish(out);
        }
        1 => {
            let out = draw.call("try_product", || try_product(rows, weight));
            draw.finish(out);
        }
        _ => {
            let [d_in, d_out] = weight.dims().map(|size| size.max(1));
            let bias = draw.one_in(2);
            let mut layer = LinearConfig::new(d_in, d_out)
                .with_bias(bias)
                .init(&draw.device);
            if !draw.one_in(3) {
                let dtype = draw.dtype;
                layer.weight = layer.weight.map(|weight| weight.cast(dtype));
                layer.bias = layer.bias.map(|bias| bias.map(|bias| bias.cast(dtype)));
            }
            draw.note(("layer", d_in, d_out, layer.weight.val().dtype()));
            let out = draw.call("try_linear", || try_linear(&layer, x));
            draw.finish(out);
        }
    }
}

pub fn gates_and_scores(draw: &mut Draw) {
    let (batch, len) = (draw.batch(), draw.len());
    let width = draw.pick(&[0, 1, 8, 16]);
    if draw.one_in(2) {
        let [gate, up] = ["gate", "up"].map(|name| draw.tensor(name, [batch, len, width]));
        let out = draw.call("try_swiglu", || try_swiglu(gate, up));
        return draw.finish(out);
    }
    let tokens = draw.tensor("tokens", [batch, len, width]);
    let heads = draw.pick(&[0, 1, 2]);
    let score_proj = draw.tensor("score_proj", [width, heads]);
    let scores = draw.call("try_linear_scores", || {
        try_linear_scores(tokens, score_proj)
    });
    draw.finish(scores);
}

pub fn norms(draw: &mut Draw) {
    let Sizes {
        batch,
        q_heads,
        q_len,
        dim,
        ..
    } = draw.sizes();
    let epsilon = draw.number("epsilon", &[1e-5, 1.0]) as f32;
    if draw.one_in(2) {
        let width = draw.pick(&[0, 1, 8, 24, 8193]);
        let x = draw.tensor("x", [batch.min(1), q_len.min(2), width]);
        let gamma = draw.tensor("gamma", [width]);
        let out = draw.call("try_rms_norm", || try_rms_norm(x, gamma, epsilon));
        return draw.finish(out);
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
    let out = draw.call("HeadEncoding::try_forward", || encoding.try_forward());
    draw.finish(out);
}

pub fn checks(draw: &mut Draw) {
    let shape = [draw.batch(), draw.len(), draw.len()];
    let x = draw.tensor("x", shape);
    let step = draw.end("step");
    if draw.one_in(2) {
        draw.call("try_check_finite", || try_check_finite(&x, "x", step));
        return;
    }
    let y = draw.tensor("y", [shape[1]]);
    let checks = FiniteChecks::new(step).hiding("y", &y);
    let checks = match draw.one_in(2) {
        true => checks.tensor("x", &x),
        false => checks,
    };
    draw.call("FiniteChecks::try_check", || checks.try_check());
}

pub fn overwritten(draw: &mut Draw) {
    let shape = [draw.batch(), draw.len()];
    let tokens = draw.ints("tokens", shape, 9);
    let count = tokens.shape().num_elements() + usize::from(draw.one_in(8));
    let values = vec![1; count];
    let tokens = draw.call("try_overwrite", || cache::try_overwrite(tokens, &values));
    if let Some(tokens) = tokens {
        draw.run("reading a result", || drop(tokens.into_data()));
    }
}

pub fn causality(draw: &mut Draw) {
    let (batch, len) = (draw.batch(), draw.len());
    let width = draw.pick(&[0, 1, 3]);
    let tolerance = draw.number("tolerance", &[1e-5, 1e-2]);
    let leaks = draw.one_in(3);
    let x = draw.tensor("x", [batch, len, width]);
    draw.call("try_assert_causal", || {
        let model = |x: Tensor<3>| match leaks && !x.dims().contains(&0) {
            true => x.flip([1]),
            false => x,
        };
        try_assert_causal(model, x, tolerance)
    });
}

pub fn gradients(draw: &mut Draw) {
    let mut sizes = draw.sizes();
    (sizes.q_len, sizes.k_len) = (sizes.q_len.min(5), sizes.k_len.min(5));
    let scored = draw.one_in(2);
    let options = draw.options(sizes.q_heads, scored);
    let element = draw.pick(&[ElementType::F32, ElementType::F16, ElementType::Bf16]);
    let (q, kv) = (sizes.q(), sizes.kv());
    let scores = scored.then_some(&kv[..3]);
    let problem = draw.call("Problem::new", || {
        Problem::new(&q, &kv, &kv, scores, element, &options)
    });
    if let Some(problem) = problem {
        let device = draw.device.clone();
        draw.call("try_check_gradients", || {
            try_check_gradients(&problem, &device)
        });
    }
}

pub fn losses(draw: &mut Draw) {
    let (tokens, classes) = (draw.len(), draw.pick(&[1, 2, 9]));
    let dtype = draw.pick(&[DType::F32, DType::F16, DType::BF16]);
    let logits = draw.tensor_in("logits", [tokens, classes], dtype);
    let [tokens, classes] = logits.dims();
    let targets = draw.ints("targets", [tokens], classes);
    if classes > 0 && targets.dims() == [tokens] {
        let loss = draw.run("cross_entropy", || {
            cross_entropy(logits.clone(), targets.clone())
        });
        draw.finish(loss);
        let losses = draw.run("token_losses", || token_losses(logits, targets));
        draw.finish(losses);
    }
    let table = burn::nn::EmbeddingConfig::new(5, 3).init(&draw.device);
    let (batch, len) = (draw.batch(), draw.len());
    let tokens = draw.ints("tokens", [batch, len], 5);
    let dtype = draw.pick(&[FloatDType::F32, FloatDType::BF16]);
    let rows = draw.run("embed", || embed(&table, tokens, dtype));
    draw.finish(rows);
}

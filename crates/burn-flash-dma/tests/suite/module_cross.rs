//! Cross-attention that keeps the best tokens of its context, against its definition in Burn's own operations.

use crate::case::{data, grad, refused, refused_as, size, tracked, values, within};
use crate::layer::{SPREAD, WIDTH, parameters, score_projection};
use burn::module::{Lora, Module};
use burn::nn::RmsNorm;
use burn::optim::GradientsParams;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Bool, Device, Distribution, Tensor};
use burn_flash_dma::nn::{
    CrossKeys, DynamicMaskCrossAttention, DynamicMaskCrossAttentionConfig, DynamicMaskInput,
    QkNorm, ScoreLearning, Scores,
};
use burn_flash_dma::{AttentionError, AttentionMask, Documents};

const CONTEXT: usize = 24;
const LEN: usize = 30;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

fn config() -> DynamicMaskCrossAttentionConfig {
    DynamicMaskCrossAttentionConfig::new(WIDTH, HEADS)
        .with_d_context(Some(CONTEXT))
        .with_n_kv_heads(Some(KV_HEADS))
        .with_window(Some(7))
        .with_initializer(SPREAD)
}

fn configs() -> Vec<(&'static str, DynamicMaskCrossAttentionConfig)> {
    let (dma, added) = (
        || config().with_scores(Scores::Dma),
        || config().with_scores(Scores::Added),
    );
    let scaled = added().with_scale(Some(0.7));
    vec![
        ("the default", config()),
        ("runners-up", config().with_learning(Some(runners_up(9)))),
        ("no runners-up", config().with_learning(Some(runners_up(0)))),
        ("every token", config().with_window(None)),
        ("dma", dma()),
        (
            "dma with runners-up",
            dma().with_learning(Some(runners_up(4))),
        ),
        ("added", added()),
        (
            "added, runners-up",
            added().with_learning(Some(runners_up(9))),
        ),
        ("added, every token", added().with_window(None)),
        ("a wide window", added().with_window(Some(100))),
        ("one token", config().with_window(Some(1))),
        ("no norms", config().with_qk_norm(QkNorm::None)),
        ("biases", config().with_bias(true).with_softcap(Some(4.0))),
        ("scale", scaled.with_n_kv_heads(None)),
    ]
}

fn runners_up(count: usize) -> ScoreLearning {
    ScoreLearning::none()
        .with_tokens(true)
        .with_runners_up(Some(count))
}

fn random(len: usize, width: usize, device: &Device) -> Tensor<3> {
    tracked([2, len, width], device)
}

/// Indices of the tokens by rank: greater score first, then lower index; without hidden ones.
fn ranked(scores: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len())
        .filter(|&at| scores[at] > f64::NEG_INFINITY)
        .collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order
}

/// `true` for the tokens whose ranks are in a range, `[batch, heads, 1, len]`.
fn of_ranks(scores: &Tensor<3>, ranks: std::ops::Range<usize>) -> Tensor<4, Bool> {
    let [batch, heads, len] = scores.dims();
    let mut kept = Vec::new();
    for row in values(scores.clone()).chunks(len) {
        let order = ranked(row);
        let chosen = order.iter().take(ranks.end).skip(ranks.start);
        kept.extend((0..len).map(|at| chosen.clone().any(|&rank| rank == at)));
    }
    Tensor::from_data(data(kept, [batch, heads, 1, len]), &scores.device())
}

/// The definition of the layer in Burn's own operations, with the given scores of its tokens.
fn defined(
    config: &DynamicMaskCrossAttentionConfig,
    layer: &DynamicMaskCrossAttention,
    x: Tensor<3>,
    context: Tensor<3>,
    scores: Tensor<3>,
) -> Tensor<3> {
    let window = config.window.unwrap_or(LEN);
    let default = match config.scores {
        Scores::Dma => 0,
        _ => (window / 4).max(8),
    };
    let runners_up = config
        .learning
        .as_ref()
        .and_then(|learning| learning.runners_up);
    let runners_up = runners_up.unwrap_or(default);
    let runners_up = config.window.map_or(0, |_| runners_up);
    let heads = |rows: Tensor<3>, norm: &Option<RmsNorm>| {
        let [batch, len, width] = rows.dims();
        let rows = rows.reshape([batch, len, width / 8, 8]);
        let rows = (norm.iter()).fold(rows, |rows, norm| norm.forward(rows));
        rows.swap_dims(1, 2)
    };
    let q = heads(layer.q_proj.forward(x.clone()), &layer.q_norm);
    let k = heads(layer.k_proj.forward(context.clone()), &layer.k_norm);
    let v = heads(layer.v_proj.forward(context), &None);
    let [batch, heads, len, dim] = q.dims();
    let [_, kv_heads, k_len, _] = k.dims();
    let spread = |rows: Tensor<4>| {
        let [_, _, _, features] = rows.dims();
        let shape = [batch, kv_heads, heads / kv_heads, k_len, features];
        let rows: Tensor<5> = rows.unsqueeze_dim(2);
        rows.expand(shape).reshape([batch, heads, k_len, features])
    };
    let pairs = |shown: Tensor<4, Bool>| {
        // [batch, kv_heads, 1, k_len] to every pair.
        let shown = spread(shown.swap_dims(2, 3).float()).swap_dims(2, 3);
        shown.greater_elem(0.5).expand([batch, heads, len, k_len])
    };
    let kept = pairs(of_ranks(&scores, 0..window));
    let next = pairs(of_ranks(&scores, window..window + runners_up));
    let (k, v) = (spread(k), spread(v));
    let hidden = scores.clone().equal_elem(f32::NEG_INFINITY);
    let scores = scores.mask_fill(hidden, 0.0);
    let scores = spread(scores.unsqueeze_dim::<4>(3)).swap_dims(2, 3);

    let logits = q.matmul(k.transpose()) * config.scale.unwrap_or((8.0f32).sqrt().recip());
    let logits = match config.softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    };
    // A score that only ranks is not added, but a runner-up's has the gradient as if it were.
    let logits = match config.scores {
        Scores::Ranking => logits,
        Scores::Dma | Scores::Added => logits + scores.clone(),
    };
    let shown = logits.clone().mask_fill(kept.clone().bool_not(), -1e30);
    let weights = softmax(shown.clone(), 3).mask_fill(kept.bool_not(), 0.0);
    let out = weights.matmul(v.clone());

    // A runner-up adds nothing; its score has the gradient of its possible contribution.
    let most = shown.clone().max_dim(3);
    let lse = (shown - most.clone()).exp().sum_dim(3).log() + most;
    let p = sigmoid(logits - lse).mask_fill(next.bool_not(), 0.0);
    let p = p.detach();
    let slope = scores.clone() - scores.detach();
    let moved = (p.clone() * slope.clone()).matmul(v.detach())
        - (p * slope).sum_dim(3) * out.clone().detach();
    let out = (out + moved).swap_dims(1, 2);
    layer.o_proj.forward(out.reshape([batch, len, heads * dim]))
}

/// Gradients of every parameter and of the two inputs, by name.
fn slopes(
    layer: &DynamicMaskCrossAttention,
    [x, context]: [&Tensor<3>; 2],
    out: Tensor<3>,
    slope: &Tensor<3>,
) -> Vec<(String, Vec<f64>)> {
    let grads = (out * slope.clone()).sum().backward();
    let inputs = [("x", grad(x, &grads)), ("context", grad(context, &grads))];
    let gradients = GradientsParams::from_grads(grads, layer);
    let of_layer = parameters(layer, &gradients).into_iter();
    let of_layer = of_layer.map(|of| (of.name, of.gradient.unwrap_or_default()));
    let of_inputs = inputs.map(|(name, slope)| (name.into(), slope));
    of_layer.chain(of_inputs).collect()
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    within(actual, expected, 1e-5 * size(expected).max(1.0), what);
}

#[test]
fn outputs_and_gradients_are_those_of_the_definition() {
    let device = Device::flex().autodiff();
    for (name, config) in configs() {
        let layer = config.init(&device);
        // Fewer and more queries than tokens; one context has padding and a hidden token.
        for (len, padded) in [(11, false), (1, true), (45, true)] {
            let what = format!("{name}, {len} queries, padded {padded}");
            let (x, context) = (random(len, WIDTH, &device), random(LEN, CONTEXT, &device));
            let mut shown = [true; LEN];
            shown[3] = false;
            let shown = Tensor::<1, Bool>::from_data(shown, &device).reshape([1, 1, 1, LEN]);
            let input = || {
                let input = DynamicMaskInput::new(context.clone());
                match padded {
                    false => input,
                    true => (input.lengths([LEN, 19])).mask(AttentionMask::visible(shown.clone())),
                }
            };
            let out = layer.forward(x.clone(), input());
            let scores = layer.keys(input()).scores().clone();
            let expected = defined(&config, &layer, x.clone(), context.clone(), scores);
            close(&values(out.clone()), &values(expected.clone()), &what);

            let slope = out.random_like(Distribution::Normal(0.0, 1.0));
            let inputs = [&x, &context];
            let actual = slopes(&layer, inputs, out, &slope);
            let expected = slopes(&layer, inputs, expected, &slope);
            let largest = expected.iter().map(|(_, slope)| size(slope));
            let largest = largest.fold(0.0, f64::max);
            for ((of, actual), (_, expected)) in actual.iter().zip(&expected) {
                if actual.is_empty() {
                    // Scores that only rank learn nothing without runners-up.
                    let nothing = of.ends_with("score_proj") && size(expected) == 0.0;
                    assert!(nothing, "{what}: {of} has no gradient");
                    continue;
                }
                // A small gradient, such as that of the decay, and a zero one, such as that of q over one token, are
                // differences of terms of the others' size, which f32 rounds to 6e-8 of it each.
                let bound = (1e-5 * size(expected).max(1.0)).max(2e-6 * largest);
                within(actual, expected, bound, format!("{what}, gradient of {of}"));
            }
        }
    }
}

/// The layers with and without runners-up differ only in the gradients of the scores.
#[test]
fn runners_up_change_the_gradient_of_the_scores_alone() {
    let device = Device::flex().autodiff();
    let [with, without] = [9, 0].map(|count| config().with_learning(Some(runners_up(count))));
    let with = with.init(&device);
    let without = (without.init(&device)).load_record(with.clone().into_record());
    let (x, context) = (random(12, WIDTH, &device), random(LEN, CONTEXT, &device));
    let outs = [&with, &without].map(|layer| layer.forward(x.clone(), context.clone()));
    assert_eq!(values(outs[0].clone()), values(outs[1].clone()));
    let slope = x.random_like(Distribution::Normal(0.0, 1.0));
    let [with, without] = [(&with, 0), (&without, 1)]
        .map(|(layer, at)| slopes(layer, [&x, &context], outs[at].clone(), &slope));
    for ((name, with), (_, without)) in with.iter().zip(&without) {
        // The context gets its share through the scores.
        let moves = name == "context" || name.ends_with("score_proj");
        assert_eq!(with != without, moves, "{name}");
    }
}

#[test]
fn the_keys_of_a_context_serve_every_step() {
    let device = Device::flex();
    for (name, config) in configs() {
        let layer = config.init(&device);
        let (x, context) = (random(6, WIDTH, &device), random(LEN, CONTEXT, &device));
        let input = || DynamicMaskInput::new(context.clone()).lengths([LEN, 19]);
        let keys = layer.keys(input());
        let whole = layer.forward(x.clone(), input());
        for at in 0..6 {
            let step = layer.forward_with_keys(x.clone().narrow(1, at, 1), &keys);
            let row = whole.clone().narrow(1, at, 1);
            close(&values(step), &values(row), name);
        }
    }
}

#[test]
fn a_padded_context_equals_the_context_alone() {
    let device = Device::flex();
    let layer = config().init(&device);
    let (x, context) = (random(6, WIDTH, &device), random(LEN, CONTEXT, &device));
    let behind = (context.clone()).slice_fill([0..2, 19..LEN, 0..CONTEXT], f32::NAN);
    let padded = layer.forward(x.clone(), DynamicMaskInput::new(behind).lengths([19, 19]));
    let alone = layer.forward(x.clone(), context.clone().narrow(1, 0, 19));
    close(&values(padded), &values(alone), "padding");
    // An empty context gives zero attention.
    let none = layer.forward(x, DynamicMaskInput::new(context).lengths([0, LEN]));
    let [first, second] = [0, 1].map(|at| values(none.clone().narrow(0, at, 1)));
    assert!(first.iter().all(|&value| value == 0.0));
    assert!(second.iter().any(|&value| value != 0.0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let init = |config: DynamicMaskCrossAttentionConfig| config.try_init(&device);
    let error = init(config().with_head_dim(Some(12))).unwrap_err();
    assert_eq!(error, AttentionError::HeadDim { head_dim: 12 });
    refused(init(config().with_window(Some(0))), "ZeroWindow");
    refused(init(config().with_qk_norm(QkNorm::Rms(0.0))), "Epsilon");

    let layer = config().init(&device);
    let (x, context) = (random(6, WIDTH, &device), random(LEN, CONTEXT, &device));
    let input = || DynamicMaskInput::new(context.clone());
    let forward = |input: DynamicMaskInput| layer.try_forward(x.clone(), input);
    let documents = Documents::from_lengths([vec![10, 20], vec![LEN]]);
    refused(forward(input().documents(documents)), "SelectionNotCausal");
    let pairs = Tensor::<4, Bool>::full([1, 1, 6, LEN], true, &device);
    refused_as(
        forward(input().mask(AttentionMask::visible(pairs))),
        "a mask that differs between queries rules out cross-attention: it leaves keys on no interval of queries",
    );
    refused(forward(random(LEN, WIDTH, &device).into()), "Shape");
    refused(forward(context.clone().narrow(0, 0, 1).into()), "Shape");
    let keys = layer.keys(context);
    let tokens = random(6, CONTEXT, &device);
    refused(layer.try_forward_with_keys(tokens, &keys), "Shape");
    let wider = config().with_window(Some(8)).init(&device);
    refused(wider.try_forward_with_keys(x, &keys), "IntervalsWindow");
}

#[test]
fn the_keys_of_another_layer_are_refused() {
    let device = Device::flex();
    let layer = |head_dim, kv_heads, window| {
        DynamicMaskCrossAttentionConfig::new(32, 4)
            .with_n_kv_heads(Some(kv_heads))
            .with_head_dim(Some(head_dim))
            .with_window(window)
            .init(&device)
    };
    let (x, context) = (random(6, 32, &device), random(LEN, 32, &device));
    let refused = |layer: &DynamicMaskCrossAttention, keys: &CrossKeys, text| {
        refused_as(layer.try_forward_with_keys(x.clone(), keys), text);
    };
    // Their heads divide those of q, so other queries would share them.
    let keys = layer(8, 4, None).keys(context.clone());
    let text = "k must have size 2 on axis 1, but has 4";
    refused(&layer(8, 2, None), &keys, text);
    let text = "k must have size 1 on axis 1, but has 4";
    refused(&layer(8, 1, None), &keys, text);
    let text = "k must have size 16 on axis 3, but has 8";
    refused(&layer(16, 4, None), &keys, text);
    // So is another window, whichever of the two layers has none.
    let few = layer(8, 4, Some(8));
    let text = "the options keep 8 keys, but the intervals were selected for all";
    refused(&few, &keys, text);
    let text = "the options keep all keys, but the intervals were selected for 8";
    refused(&layer(8, 4, None), &few.keys(context), text);
}

#[test]
fn adapters_reach_the_projections_and_the_scores() {
    for scores in [Scores::Dma, Scores::Ranking] {
        let layer = config()
            .with_scores(scores)
            .init(&Device::flex().autodiff());
        let layer = layer.apply_lora(Lora::new(2, 4.0));
        for projection in [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj] {
            assert!(projection.weight.adapter().is_some());
        }
        assert!(score_projection(&layer.scorer).adapter().is_some());
    }
}

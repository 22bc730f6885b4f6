//! The kinds of a layer's scores: against their formulas in f64, gradients against differences, types, records and
//! configurations.

use crate::case::{close, grad, normal, refused_as, size, tensor, values};
use crate::layer::{
    self, Groups, WIDTH, broken, cast, like, of_scores, reread, score_projection, tokens_for,
};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Logits, QkNorm, Scorer,
    Scores, Selection,
};
use burn_flash_dma::{
    AttentionError, AttentionMask, AttentionOptions, ElementType, Problem, ScoreRole,
    linear_scores, try_linear_scores, zoh_scores,
};
use burn_store::ModuleSnapshot;
use flash_dma_reference::{Inputs, Rng};

/// The kinds that are added to the logits.
const ADDED: [Scores; 2] = [Scores::Dma, Scores::Added];
const BATCH: usize = 2;
const LEN: usize = 19;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

fn config(scores: Scores) -> DynamicMaskAttentionConfig {
    layer::config().with_scores(scores)
}

fn input(layer: &DynamicMaskAttention) -> Tensor<3> {
    tokens_for(layer, BATCH, LEN)
}

/// `[rows, inner] . [inner, columns]`.
fn product(a: &[f64], b: &[f64], inner: usize, columns: usize) -> Vec<f64> {
    let entry = |row: &[f64], column: usize| -> f64 {
        (row.iter().enumerate())
            .map(|(i, x)| x * b[i * columns + column])
            .sum()
    };
    (a.chunks(inner))
        .flat_map(|row| (0..columns).map(move |column| entry(row, column)))
        .collect()
}

/// `[batch, len, heads, dim]` to `[batch, heads, len, dim]`.
fn by_heads(rows: &[f64], heads: usize, dim: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows.len()];
    for (at, &x) in rows.iter().enumerate() {
        let (row, h, d) = (at / (heads * dim), at / dim % heads, at % dim);
        let (b, n) = (row / LEN, row % LEN);
        out[((b * heads + h) * LEN + n) * dim + d] = x;
    }
    out
}

/// Scores `[batch, kv_heads, len]` by the formulas, from tokens and the rows of their values.
fn formula(layer: &DynamicMaskAttention, x: &[f64], v: &[f64]) -> Vec<f64> {
    let rows = match layer.scorer() {
        Scorer::Linear(linear) => {
            let products = product(x, &values(linear.score_proj.val()), WIDTH, KV_HEADS);
            products.iter().map(|z| 10.0 * z).collect::<Vec<f64>>()
        }
        Scorer::Zoh(zoh) => {
            let transposed = values(zoh.dt_proj.val().transpose());
            let dt = product(v, &transposed, KV_HEADS * DIM, KV_HEADS);
            let a = values(zoh.a.val());
            let score = |(at, dt): (usize, &f64)| (a[at % KV_HEADS] * dt.exp().ln_1p()).exp();
            dt.iter().enumerate().map(score).collect()
        }
    };
    by_heads(&rows, KV_HEADS, 1)
}

#[test]
fn scores_and_outputs_are_those_of_the_formulas_in_f64() {
    let device = Device::flex();
    for scores in ADDED {
        let layer = config(scores).with_qk_norm(QkNorm::None).init(&device);
        let tokens = input(&layer);
        let x = values(tokens.clone());
        let rows = |linear: &Linear, width| product(&x, &values(linear.weight.val()), WIDTH, width);
        let v = rows(&layer.v_proj, KV_HEADS * DIM);
        let scores = formula(&layer, &x, &v);
        assert_eq!(layer.scores(tokens.clone()).dims(), [BATCH, KV_HEADS, LEN]);
        // Selects by the layer's own scores: rounding may decide between two that are nearly equal.
        let own = values(layer.scores(tokens.clone()));
        close(&own, &scores, 1e-6);

        let (q, kv) = ([BATCH, Q_HEADS, LEN, DIM], [BATCH, KV_HEADS, LEN, DIM]);
        let options = AttentionOptions::new().with_keep_window(5);
        assert_eq!(layer.options(), options);
        let z = Some(&kv[..3]);
        let problem = Problem::new(&q, &kv, &kv, z, ElementType::F32, &options).unwrap();
        let exact = Inputs {
            problem,
            q: by_heads(&rows(&layer.q_proj, Q_HEADS * DIM), Q_HEADS, DIM),
            k: by_heads(&rows(&layer.k_proj, KV_HEADS * DIM), KV_HEADS, DIM),
            v: by_heads(&v, KV_HEADS, DIM),
            scores: Some(own),
        };
        let out = tensor::<4>(&exact.forward().out.values, q, ElementType::F32, &device);
        let out = values(out.swap_dims(1, 2));
        let weight = values(layer.o_proj.weight.val());
        let out = product(&out, &weight, Q_HEADS * DIM, WIDTH);
        close(&values(layer.forward(tokens)), &out, 1e-5);
    }
}

/// Adds a number to one element of a parameter.
struct Nudge {
    param: ParamId,
    at: usize,
    by: f32,
}

impl ModuleMapper for Nudge {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.id != self.param {
            return param;
        }
        param.map(|value| {
            let mut data = values(value.clone());
            data[self.at] += f64::from(self.by);
            tensor(&data, value.dims(), ElementType::F32, &value.device())
        })
    }
}

/// Fills all parameters with small numbers, the same in every run.
struct Fill(Rng);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let numbers = normal(&mut self.0, value.dims(), &value.device()) * 0.1;
            numbers.detach().require_grad()
        })
    }
}

/// Central differences where the selection does not change, for every parameter of both kinds.
#[test]
fn gradients_of_the_scores_parameters_match_differences() {
    let device = Device::flex().autodiff();
    for (scores, window) in [
        (Scores::Dma, None),
        (Scores::Dma, Some(14)),
        (Scores::Added, None),
        (Scores::Added, Some(9)),
    ] {
        let mut rng = Rng::new(3);
        let [x, weight] = [(); 2].map(|()| normal(&mut rng, [BATCH, LEN, WIDTH], &device));
        let config = config(scores)
            .with_qk_norm(QkNorm::None)
            .selection(|s| s.with_window(window));
        let layer = config.init(&device).map(&mut Fill(rng));
        let loss = |layer: &DynamicMaskAttention| -> f64 {
            let out = values(layer.valid().forward(x.clone().inner()));
            let products = out.iter().zip(values(weight.clone()));
            products.map(|(a, b)| a * b).sum()
        };
        let selection =
            |layer: &DynamicMaskAttention| layer.selection(x.clone()).into_tensor().into_data();
        let kept = selection(&layer);
        let grads = (layer.forward(x.clone()) * weight.clone()).sum().backward();
        let projection = score_projection(layer.scorer());
        let mut params = vec![(projection.id, grad(&projection.val(), &grads))];
        if let Scorer::Zoh(zoh) = layer.scorer() {
            params.push((zoh.a.id, grad(&zoh.a.val(), &grads)));
        }
        for (param, analytic) in params {
            let scale = size(&analytic);
            let mut compared = 0;
            for (at, &gradient) in analytic.iter().enumerate() {
                let by = 3e-3;
                let nudged = |by| layer.clone().map(&mut Nudge { param, at, by });
                let (up, down) = (nudged(by), nudged(-by));
                assert_ne!(values(up.scores(x.clone())), values(down.scores(x.clone())));
                if selection(&up) == kept && selection(&down) == kept {
                    let slope = (loss(&up) - loss(&down)) / (2.0 * f64::from(by));
                    assert!(
                        (slope - gradient).abs() < 5e-3 * scale,
                        "{scores:?} {window:?} [{at}]: {gradient} instead of {slope} (greatest {scale})"
                    );
                    compared += 1;
                }
            }
            assert!(compared * 3 > analytic.len(), "{compared} compared");
        }
    }
}

/// A layer whose scores only rank, and one that also adds them.
fn of_both_roles(device: &Device) -> [DynamicMaskAttention; 2] {
    let of = |s: Selection| s.with_recent(Some(1)).with_recency(false);
    let recent = |scores| config(scores).selection(of);
    let adding = recent(Scores::Added).init(device);
    let ranking = like(&adding, &recent(Scores::Ranking));
    [ranking, adding]
}

/// Tokens under a mask that hides from each query the keys three or more before it.
fn masked(x: Tensor<3>) -> DynamicMaskInput {
    let hidden = Tensor::<2>::ones([LEN, LEN], &x.device()).tril(-3).bool();
    DynamicMaskInput::new(x).mask(AttentionMask::hidden(hidden.unsqueeze()))
}

#[test]
fn scores_that_only_rank_are_not_added() {
    let [ranking, adding] = of_both_roles(&Device::flex());
    let roles = [&ranking, &adding].map(|layer| layer.score_role());
    assert_eq!(roles, [ScoreRole::Rank, ScoreRole::RankAndBias]);
    let x = input(&ranking);
    let scores = ranking.scores(x.clone());
    let out = values(ranking.forward(x.clone()));
    // Only their order matters, not their size.
    let greater = ranking.forward_with_scores(x.clone(), scores.clone() * 8.0);
    assert!(values(greater) == out);
    // Too small to add anything, they rank as before.
    let small = scores.clone() * (-40f32).exp2();
    let by_small = adding.forward_with_scores(x.clone(), small.clone());
    close(&values(by_small), &out, 1e-6);
    let by_small = adding.forward_with_scores(masked(x.clone()), small);
    let out = values(ranking.forward(masked(x)));
    close(&out, &values(by_small), 1e-6);
}

/// With all keys, and in a window that evicts none, neither they nor a NaN has any effect; −∞ hides its key as ever.
#[test]
fn scores_that_only_rank_do_nothing_where_no_key_is_evicted() {
    let device = Device::flex().autodiff();
    for window in [None, Some(LEN)] {
        let of = |scores| {
            let config = config(scores).selection(|s| s.with_window(window));
            // Kept keys that learn do so in every window.
            config.learning(|l| l.with_kept(false))
        };
        let adding = of(Scores::Added).init(&device);
        let ranking = like(&adding, &of(Scores::Ranking));
        let x = input(&adding);
        let zeros = Tensor::<3>::zeros([BATCH, KV_HEADS, LEN], &device);
        let plain = values(adding.forward_with_scores(x.clone(), zeros.clone()));
        let scores = ranking.scores(x.clone()) * 50.0;
        let scores = scores.slice_fill([0..1, 0..2, 4..5], f32::NAN);
        let out = ranking.forward_with_scores(x.clone(), scores.clone());
        close(&values(out), &plain, 1e-6);

        let hide = |scores: Tensor<3>| scores.slice_fill([0..2, 0..2, 3..4], f32::NEG_INFINITY);
        let hidden = values(ranking.forward_with_scores(x.clone(), hide(scores)));
        let expected = values(adding.forward_with_scores(x.clone(), hide(zeros)));
        assert!(hidden != plain, "{window:?}");
        close(&hidden, &expected, 1e-6);

        let grads = ranking.forward(x).square().sum().backward();
        let gradient = score_projection(ranking.scorer()).val().grad(&grads);
        assert!(gradient.is_none_or(|g| values(g).iter().all(|&g| g == 0.0)));
    }
}

/// By the formula in f64. Neither the scores nor a token's gradient through them depend on the projection's length,
/// which training does not bound.
#[test]
fn linear_scores_that_only_rank_are_of_their_projections_direction() {
    let [layer, _] = of_both_roles(&Device::flex().autodiff());
    let x = input(&layer).require_grad();
    let rows = values(score_projection(layer.scorer()).val());
    let products = product(&values(x.clone()), &rows, WIDTH, KV_HEADS);
    let length = |head: usize| {
        let column = rows.iter().skip(head).step_by(KV_HEADS);
        column.map(|w| w * w).sum::<f64>().sqrt()
    };
    let expected: Vec<f64> = (products.iter().enumerate())
        .map(|(at, z)| z / length(at % KV_HEADS))
        .collect();
    let scores = values(layer.scores(x.clone()));
    close(&scores, &by_heads(&expected, KV_HEADS, 1), 1e-5);

    let learned = |factor: f32| {
        let layer = layer.clone().map(&mut LongerProjection(factor));
        let out = layer.forward(x.clone());
        let grads = out.clone().square().sum().backward();
        (values(out), grad(&x, &grads))
    };
    let (out, gradient) = learned(1.0);
    let (longer_out, longer_gradient) = learned(1000.0);
    close(&longer_out, &out, 1e-6);
    close(&longer_gradient, &gradient, 1e-4);
    let (_, of_zeros) = learned(0.0);
    assert!(of_zeros.iter().all(|g| g.is_finite()));
}

/// Scales the projection of a linear scorer.
struct LongerProjection(f32);

impl ModuleMapper for LongerProjection {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.dims()[..] == [WIDTH, KV_HEADS] {
            true => param.map(|value| (value * self.0).detach().require_grad()),
            false => param,
        }
    }
}

#[test]
fn scores_that_only_rank_learn_by_their_runners_up() {
    let device = Device::flex().autodiff();
    let [layer, _] = of_both_roles(&device);
    let gradient = |layer: &DynamicMaskAttention| {
        let grads = layer.forward(input(layer)).square().sum().backward();
        let gradient = score_projection(layer.scorer()).val().grad(&grads);
        gradient.map_or(0.0, |gradient| values(gradient.square().sum())[0])
    };
    assert!(gradient(&layer) > 0.0);
    let alone = config(Scores::Ranking)
        .learning(|l| l.with_runners_up(Some(0)).with_kept(false))
        .init(&device);
    assert_eq!(gradient(&alone), 0.0);

    let error = layer.try_forward(masked(input(&layer))).unwrap_err();
    let what = "training scores that only rank";
    assert_eq!(error, AttentionError::MaskedSelection { what });
}

/// In 16 bits many scores would be equal; the products of 16-bit numbers in f32 are not.
#[test]
fn a_16_bit_layer_has_scores_in_f32() {
    for (dtype, device) in [DType::F16, DType::BF16].map(|d| (d, Device::flex().autodiff())) {
        for scores in ADDED {
            let original = config(scores).init(&device);
            let layer = cast(original.clone(), dtype);
            let x = tokens_for(&layer, 1, 500).cast(dtype);
            let scores = layer.scores(x.clone());
            assert_eq!(scores.dtype(), DType::F32);
            if let Scorer::Linear(linear) = layer.scorer() {
                let weight = values(linear.score_proj.val());
                let exact: Vec<f64> = product(&values(x.clone()), &weight, WIDTH, KV_HEADS);
                let rows = values(scores.clone().swap_dims(1, 2));
                let exact: Vec<f64> = exact.iter().map(|z| 10.0 * z).collect();
                close(&rows, &exact, 1e-6);
            }
            let distinct = |scores: Tensor<3>| {
                let mut scores = values(scores.narrow(1, 0, 1));
                scores.sort_by(f64::total_cmp);
                scores.dedup();
                scores.len()
            };
            assert!(distinct(scores.clone()) > 490);
            assert!(distinct(scores.clone()) > distinct(scores.cast(dtype)));

            let out = layer.forward(x);
            assert_eq!(out.dtype(), dtype);
            let grads = out.sum().backward();
            // Through the casts.
            assert!(of_scores(&original, &grads).iter().any(|&x| x != 0.0));
        }
    }
}

#[derive(Module, Debug)]
struct Block<M: Module> {
    attention: M,
    after: Linear,
}

#[test]
fn a_record_has_the_parameters_of_its_form_beside_the_projections() {
    let device = Device::flex();
    for (scores, expected) in [
        (Scores::Dma, &["dt_proj", "a"][..]),
        (Scores::Added, &["score_proj"]),
    ] {
        let linear = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        let block = || Block {
            attention: config(scores).init(&device),
            after: linear.init(&device),
        };
        let (block, restored) = (block(), block());
        let names: Vec<String> = (block.collect(None, None, false).iter())
            .map(|tensor| tensor.name.clone())
            .collect();
        let projections = ["q", "k", "v", "o"].map(|name| format!("{name}_proj.weight"));
        let norms = ["q", "k"].map(|name| format!("{name}_norm.gamma"));
        let scores = expected.iter().map(|&name| name.into());
        let attention = projections.into_iter().chain(scores).chain(norms);
        let attention = attention.map(|name| format!("attention.{name}"));
        let expected = attention.chain(["after.weight".into()]);
        assert_eq!(names, expected.collect::<Vec<String>>());
        let x = input(&block.attention);
        let expected = values(block.attention.forward(x.clone()));
        let restored = restored.load_record(block.clone().into_record());
        assert_eq!(values(restored.attention.forward(x)), expected);
        let count = block.attention.num_params();
        let scores = Module::num_params(block.attention.scorer());
        assert_eq!(count, 3 * 32 * 32 + 2 * 8 + scores);
        assert!(format!("{}", block.attention).contains(&format!("params: {count}")));
    }
    // A record of one kind does not load into a layer of the other, with an error.
    let record = config(Scores::Dma).init(&device).into_record();
    let linear = config(Scores::Added).init(&device);
    let error = linear.try_load_record(record).unwrap_err();
    assert!(error.to_string().contains("score_proj"), "{error}");
}

#[test]
fn empty_sequences_have_empty_scores() {
    let device = Device::flex().autodiff();
    for [batch, len] in [[2, 0], [0, 3], [0, 0]] {
        let v = Tensor::<4>::zeros([batch, KV_HEADS, len, DIM], &device);
        let dt_proj = Tensor::<2>::ones([KV_HEADS, KV_HEADS * DIM], &device).require_grad();
        let zoh = zoh_scores(v, dt_proj, Tensor::ones([KV_HEADS], &device));
        let tokens = Tensor::<3>::zeros([batch, len, WIDTH], &device);
        let score_proj = Tensor::<2>::ones([WIDTH, KV_HEADS], &device).require_grad();
        for scores in [zoh, linear_scores(tokens, score_proj)] {
            assert_eq!(scores.dims(), [batch, KV_HEADS, len]);
            assert_eq!(scores.dtype(), DType::F32);
        }
    }
}

#[test]
fn a_saved_configuration_keeps_its_scores() {
    for scores in [Scores::Ranking, Scores::Dma, Scores::Added] {
        let saved = config(scores).with_logits(Logits::new().with_scale(Some(0.5)));
        let loaded = reread(&saved);
        assert_eq!(loaded.to_string(), saved.to_string());
        assert_eq!(loaded.scores, scores);
    }
    assert!(broken(&config(Scores::Added), "\"Added\"", "\"Cubic\""));
}

/// The paper's scores have no runners-up by default.
#[test]
fn a_new_layer_ranks_by_linear_scores() {
    let new = || DynamicMaskAttentionConfig::new(WIDTH, Q_HEADS).with_selection(Selection::keep(8));
    let of = |config: DynamicMaskAttentionConfig| {
        let layer = config.init(&Device::flex().autodiff());
        let linear = matches!(layer.scorer(), Scorer::Linear(_));
        let selection = layer.selection(input(&layer));
        let runners_up = selection.runner_up_ends().is_some();
        (linear, layer.score_role(), runners_up)
    };
    let (rank, add) = (ScoreRole::Rank, ScoreRole::RankAndBias);
    assert_eq!(of(new()), (true, rank, true));
    assert_eq!(of(new().with_scores(Scores::Dma)), (false, add, false));
    assert_eq!(of(new().with_scores(Scores::Added)), (true, add, true));
}

#[test]
fn wrong_parameters_of_linear_scores_are_refused() {
    let zeros = |shape| Tensor::<2>::zeros(shape, &Device::flex());
    let x = Tensor::<3>::zeros([2, 7, 16], &Device::flex());
    let text = "score_proj must have size 16 on axis 0, but has 8";
    refused_as(try_linear_scores(x.clone(), zeros([8, 2])), text);
    let wide = try_linear_scores(x.clone().cast(DType::F64), zeros([16, 2]));
    refused_as(wide, "x must be f32, f16 or bf16, but is f64");
    assert_eq!(linear_scores(x, zeros([16, 3])).dims(), [2, 3, 7]);
    let empty = Tensor::<3>::zeros([2, 0, 16], &Device::flex());
    assert_eq!(linear_scores(empty, zeros([16, 3])).dims(), [2, 3, 0]);
}

#[test]
#[should_panic(expected = "score_proj must have size 16 on axis 0, but has 8")]
fn the_plain_form_of_linear_scores_panics_with_the_text() {
    let x = Tensor::zeros([2, 7, 16], &Device::flex());
    let _ = linear_scores(x, Tensor::zeros([8, 2], &Device::flex()));
}

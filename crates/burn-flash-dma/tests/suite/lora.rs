//! Burn's low-rank adapters on the attention layer: their places, effect, training, merging and saving.

use crate::case::{close, values};
use crate::layer::{self, Parameter, WIDTH, parameters, score_projection, tokens, tokens_for};
use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, FloatDType, Gradients, Int, Tensor};
use burn_flash_dma::linear;
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Rope, Scorer, Scores,
};
use burn_flash_dma::train::{AdamWConfig, Checkpointed, clip_gradients, embed};
use burn_store::{ModuleSnapshot, PathFilter, SafetensorsStore};

const FORMS: [Scores; 2] = [Scores::Dma, Scores::Ranking];
const RANK: usize = 2;
const ALPHA: f64 = 6.0;

fn config(scores: Scores) -> DynamicMaskAttentionConfig {
    layer::config()
        .with_rope(Some(Rope::new(64)))
        .with_scores(scores)
}

/// Adapters with a nonzero product.
fn adapted<M: Module>(module: M) -> M {
    let module = module.apply_lora(Lora::new(RANK, ALPHA));
    module.map(&mut Trained::default())
}

/// Fills every second factor, as if the adapters had been trained.
#[derive(Default)]
struct Trained {
    path: Vec<String>,
}

impl ModuleMapper for Trained {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.path.ends_with(&["lora".into(), "b".into()]) {
            // A lazy parameter shares with its clones whether it is trained until its first use.
            drop(param.val());
            return param;
        }
        param.map(|b| {
            let numbers = b.random_like(Distribution::Normal(0.0, 0.2)).detach();
            numbers.set_require_grad(b.is_require_grad())
        })
    }
}

/// Few tokens, with which q, k and v are a product each, and many, with which they are one.
fn inputs(layer: &DynamicMaskAttention) -> [Tensor<3>; 2] {
    [[1, 20], [2, 19]].map(|[batch, len]| tokens_for(layer, batch, len))
}

/// Names and weights that the adapters modify.
fn weights(layer: &DynamicMaskAttention) -> [(&'static str, &Param<Tensor<2>>); 5] {
    let scores = match layer.scorer() {
        Scorer::Zoh(_) => "dt_proj",
        Scorer::Linear(_) => "score_proj",
    };
    [
        ("q_proj.weight", &layer.q_proj.weight),
        ("k_proj.weight", &layer.k_proj.weight),
        ("v_proj.weight", &layer.v_proj.weight),
        ("o_proj.weight", &layer.o_proj.weight),
        (scores, score_projection(layer.scorer())),
    ]
}

/// The names of a module's parameters in alphabetical order.
fn names<M: Module>(module: &M) -> Vec<String> {
    names_of(module, |_| true)
}

/// [`names`] of those that train.
fn trained<M: Module>(module: &M) -> Vec<String> {
    names_of(module, |parameter| parameter.trained)
}

fn names_of<M: Module>(module: &M, which: fn(&Parameter) -> bool) -> Vec<String> {
    let found = parameters(module, &GradientsParams::new()).into_iter();
    let mut names: Vec<String> = found.filter(which).map(|of| of.name).collect();
    names.sort();
    names
}

#[test]
fn the_adapters_of_every_projection_train_and_nothing_else() {
    for form in FORMS {
        let layer = config(form).init(&Device::flex().autodiff());
        let before = names(&layer);
        let layer = layer.apply_lora(Lora::new(RANK, ALPHA));
        let mut factors = (weights(&layer))
            .map(|(weight, _)| [format!("{weight}.lora.a"), format!("{weight}.lora.b")])
            .concat();
        factors.sort();
        assert_eq!(trained(&layer), factors);
        factors.extend(before);
        factors.sort();
        assert_eq!(names(&layer), factors);
    }
}

#[test]
fn a_group_says_which_projections_get_adapters() {
    let group = ParamGroup::from_regex(r"(q_proj|dt_proj)").unwrap();
    let lora = Lora::new(RANK, ALPHA).set_param_group(group);
    let layer = config(Scores::Dma)
        .init(&Device::flex().autodiff())
        .apply_lora(lora);
    let expected = ["dt_proj", "q_proj.weight"].map(|weight| {
        let factor = |factor: &str| format!("{weight}.lora.{factor}");
        [factor("a"), factor("b")]
    });
    assert_eq!(trained(&layer), expected.concat());
}

#[test]
fn new_adapters_change_nothing_and_trained_ones_are_added_to_their_weights() {
    for form in FORMS {
        let layer = config(form).init(&Device::flex());
        let lora = adapted(layer.clone());
        let fresh = layer.clone().apply_lora(Lora::new(RANK, ALPHA));
        let merged = lora.clone().materialize();
        assert_eq!(names(&merged), names(&layer));
        let [bases, adapted, sums] = [&layer, &lora, &merged].map(weights);
        for at in 0..5 {
            let adapter = adapted[at].1.adapter().expect("an adapter");
            let delta = adapter.a.val().matmul(adapter.b.val()) * (ALPHA / RANK as f64);
            let expected = values(bases[at].1.val() + delta);
            close(&values(sums[at].1.val()), &expected, 1e-6);
        }
        for x in inputs(&layer) {
            let out = values(layer.forward(x.clone()));
            assert_eq!(values(fresh.forward(x.clone())), out);
            let changed = values(lora.forward(x.clone()));
            assert_ne!(changed, out);
            assert_eq!(values(merged.forward(x.clone())), changed);
            let scores = values(lora.scores(x.clone()));
            assert_ne!(scores, values(layer.scores(x.clone())));
            assert_eq!(values(merged.scores(x.clone())), scores);

            let [batch, len, _] = x.dims();
            let mut caches = [lora.init_cache(batch), merged.init_cache(batch)];
            let halves = [0..len / 2, len / 2..len];
            for rows in halves {
                let rows = x.clone().slice([0..batch, rows]);
                let mut step = |layer: &DynamicMaskAttention, cache: usize| {
                    values(layer.forward_cached(rows.clone(), &mut caches[cache]))
                };
                assert_eq!(step(&lora, 0), step(&merged, 1));
            }
        }
    }
}

/// Compares the gradients of adapted layers with those of the merged layer trained in full: each factor's gradient
/// follows from that of its weight.
fn check_gradients(
    lora: &DynamicMaskAttention,
    gradients: &GradientsParams,
    full: &DynamicMaskAttention,
    of_full: &Gradients,
) {
    for ((name, param), (_, whole)) in weights(lora).into_iter().zip(weights(full)) {
        let adapter = param.adapter().expect("an adapter");
        let slope = whole.val().grad(of_full).unwrap() * (ALPHA / RANK as f64);
        let [a, b] = [&adapter.a, &adapter.b].map(|factor| factor.val().inner());
        let of_a = slope.clone().matmul(b.transpose());
        let exact = [of_a, a.transpose().matmul(slope)].map(values);
        for (factor, exact) in [&adapter.a, &adapter.b].into_iter().zip(&exact) {
            let gradient = values(gradients.get::<2>(factor.id).expect("a gradient"));
            close(&gradient, exact, 1e-4);
            assert!(exact.iter().any(|&x| x != 0.0), "{name}");
        }
    }
    // Two factors of five weights.
    assert_eq!(gradients.len(), 10);
}

#[test]
fn the_factors_gradients_are_those_of_the_whole_weights() {
    for form in FORMS {
        let lora = adapted(config(form).init(&Device::flex().autodiff()));
        let full = lora.clone().materialize().unfreeze();
        for x in inputs(&lora) {
            let slope = x.random_like(Distribution::Normal(0.0, 1.0));
            let loss = |layer: &DynamicMaskAttention| {
                let out = layer.forward(DynamicMaskInput::from(x.clone()));
                (out * slope.clone()).sum()
            };
            let of_full = loss(&full).backward();
            let of_lora = GradientsParams::from_grads(loss(&lora).backward(), &lora);
            check_gradients(&lora, &of_lora, &full, &of_full);
        }
    }
}

#[test]
fn blocks_that_are_computed_twice_train_their_adapters() {
    for form in FORMS {
        let lora = [adapted(config(form).init(&Device::flex().autodiff()))];
        let full = lora[0].clone().materialize().unfreeze();
        let [_, x] = inputs(&lora[0]);
        let of_full = full.forward(x.clone()).square().sum().backward();
        let stack =
            Checkpointed::forward(&lora, x, |layer, x, selections| selections.attend(layer, x));
        let loss = stack.output().square().sum();
        let of_lora = stack.backward(&loss, &lora);
        check_gradients(&lora[0], &of_lora, &full, &of_full);
    }
}

#[test]
fn a_step_of_the_optimiser_moves_the_adapters_and_leaves_the_weights() {
    for form in FORMS {
        let before = adapted(config(form).init(&Device::flex().autodiff()));
        let [_, x] = inputs(&before);
        let grads = before.forward(x.clone()).square().sum().backward();
        let mut grads = GradientsParams::from_grads(grads, &before);
        let norm = clip_gradients(&before, &mut grads, 1e-3);
        assert!(norm.into_scalar::<f32>() > 1e-3);
        // A decay would also reach the weights if they had a gradient.
        let mut optimiser = AdamWConfig::new().with_weight_decay(0.1).init();
        let after = optimiser.step(1e-2, before.clone(), grads);
        for ((name, before), (_, after)) in weights(&before).into_iter().zip(weights(&after)) {
            assert_eq!(values(before.base()), values(after.base()), "{name}");
            let [before, after] = [before, after].map(|param| param.adapter().unwrap());
            assert_ne!(values(before.a.val()), values(after.a.val()), "{name}");
            assert_ne!(values(before.b.val()), values(after.b.val()), "{name}");
        }
        let validated = after.valid();
        let out = values(validated.forward(x.clone().inner()));
        assert_eq!(out, values(after.forward(x)));
        let merged = validated.clone().materialize();
        assert!(!merged.q_proj.weight.val().is_autodiff());
        assert_eq!(trained(&validated.train()), trained(&after));
    }
}

#[test]
fn adapters_are_saved_with_their_layer_or_alone() {
    let device = Device::flex();
    for form in FORMS {
        let base = config(form).init(&device);
        let lora = adapted(base.clone());
        let [x, _] = inputs(&lora);
        let out = values(lora.forward(x.clone()));
        let new = |layer: &DynamicMaskAttention| layer.clone().apply_lora(Lora::new(RANK, ALPHA));

        let other = new(&config(form).init(&device));
        let loaded = other.clone().load_record(lora.clone().into_record());
        assert_eq!(values(loaded.forward(x.clone())), out);

        let mut whole = SafetensorsStore::from_bytes(None);
        lora.save_into(&mut whole).expect("it is saved");
        let mut loaded = other;
        let mut file = SafetensorsStore::from_bytes(Some(whole.get_bytes().unwrap()));
        loaded.load_from(&mut file).expect("the names are the same");
        assert_eq!(values(loaded.forward(x.clone())), out);

        // ANCHOR: alone
        let factors = || PathFilter::new().with_regex(r"\.lora\.[ab]$");
        let mut alone = SafetensorsStore::from_bytes(None).filter(factors());
        lora.save_into(&mut alone).expect("it is saved");
        let mut file = SafetensorsStore::from_bytes(Some(alone.get_bytes().unwrap()))
            .filter(factors())
            .allow_partial(true);
        let mut loaded = new(&base);
        let result = loaded.load_from(&mut file).expect("the names are the same");
        // ANCHOR_END: alone
        assert_eq!((result.applied.len(), result.unused.len()), (10, 0));
        assert_eq!(values(loaded.forward(x)), out);
    }
}

#[test]
fn linear_layers_and_embeddings_are_read_with_their_adapters() {
    let device = Device::flex().autodiff();
    let x = tokens(1, 20, &device);
    for dtype in [DType::F32, DType::BF16] {
        let layer = adapted(LinearConfig::new(WIDTH, 24).init(&device));
        let merged = layer.clone().materialize();
        let x = x.clone().cast(dtype);
        let y = linear(&layer, x.clone());
        assert_eq!(values(y.clone()), values(linear(&merged, x)));
        let grads = y.sum().backward();
        let adapter = layer.weight.adapter().expect("an adapter");
        assert!(adapter.a.val().grad(&grads).is_some());
        assert!(layer.weight.base().grad(&grads).is_none());
        assert!(layer.bias.expect("a bias").val().grad(&grads).is_none());
    }

    let embedding = adapted(EmbeddingConfig::new(40, WIDTH).init(&device));
    let tokens = Tensor::<1, Int>::arange(0..40, &device).reshape([4, 10]);
    let rows = embed(&embedding, tokens.clone(), FloatDType::F32);
    let merged = embed(&embedding.clone().materialize(), tokens, FloatDType::F32);
    assert_eq!(values(rows.clone()), values(merged));
    let grads = rows.sum().backward();
    let adapter = embedding.weight.adapter().expect("an adapter");
    assert!(adapter.b.val().grad(&grads).is_some());
    assert!(embedding.weight.base().grad(&grads).is_none());
}

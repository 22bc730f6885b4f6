//! The attention layer: shapes, reach of gradients, refusals, saving and loading.

use crate::case::{grad, refused, values, within};
use crate::layer::{self, Groups, SPREAD, WIDTH, tokens_for};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::softplus;
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, QkNorm, Rope, Scorer, Scores,
};
use burn_store::{ModuleSnapshot, SafetensorsStore};

fn config() -> DynamicMaskAttentionConfig {
    layer::config().with_rope(Some(Rope::new(64)))
}

fn input(layer: &DynamicMaskAttention) -> Tensor<3> {
    tokens_for(layer, 2, 19)
}

#[test]
fn a_layer_keeps_its_shape_with_every_option() {
    for config in [
        DynamicMaskAttentionConfig::new(WIDTH, 4),
        config(),
        config().with_qk_norm(QkNorm::None).with_rope(None),
        config()
            .with_head_dim(Some(16))
            .logits(|l| l.with_softcap(Some(5.0))),
        config()
            .logits(|l| l.with_causal(false))
            .with_n_kv_heads(Some(1)),
        config().with_bias(true).with_qk_norm(QkNorm::Rms(1e-6)),
    ] {
        let layer = config.init(&Device::flex());
        let out = layer.forward(input(&layer));
        assert_eq!(out.dims(), [2, 19, WIDTH]);
        assert!(values(out).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn every_parameter_gets_a_gradient_at_the_first_step() {
    for scores in [Scores::Ranking, Scores::Dma, Scores::Added] {
        let layer = config()
            .with_scores(scores)
            .init(&Device::flex().autodiff());
        let grads = layer.forward(input(&layer)).square().sum().backward();
        let projections = [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj];
        for projection in projections {
            let slope = grad(&projection.weight.val(), &grads);
            assert!(slope.iter().any(|&x| x != 0.0));
            assert!(slope.iter().all(|x| x.is_finite()));
        }
        // Every head of the scores learns.
        match layer.scorer() {
            Scorer::Zoh(zoh) => {
                let a = grad(&zoh.a.val(), &grads);
                assert!(a.iter().all(|&x| x != 0.0 && x.is_finite()), "{a:?}");
                let dt = grad(&zoh.dt_proj.val(), &grads);
                assert!(dt.chunks(16).all(|head| head.iter().any(|&x| x != 0.0)));
            }
            Scorer::Linear(linear) => {
                let slope = grad(&linear.score_proj.val(), &grads);
                let learns = slope.iter().all(|&x| x != 0.0 && x.is_finite());
                assert!(learns, "{slope:?}");
            }
        }
    }
}

#[test]
fn bad_configurations_are_refused() {
    let init = |config: DynamicMaskAttentionConfig| config.try_init(&Device::flex());
    let (q_heads, kv_heads) = (4, 3);
    let error = init(config().with_n_kv_heads(Some(3))).unwrap_err();
    assert_eq!(error, AttentionError::HeadRatio { q_heads, kv_heads });
    let error = init(config().with_head_dim(Some(12))).unwrap_err();
    assert_eq!(error, AttentionError::HeadDim { head_dim: 12 });
    refused(
        init(config().selection(|s| s.with_window(Some(0)))),
        "ZeroWindow",
    );
    refused(
        init(config().logits(|l| l.with_softcap(Some(0.0)))),
        "Softcap",
    );
    // One value is too small for f32, in which it is used.
    for epsilon in [0.0, -1.0, 1e-60, f64::NAN] {
        refused(init(config().with_qk_norm(QkNorm::Rms(epsilon))), "Epsilon");
    }
}

#[test]
fn records_and_safetensors_restore_a_layer() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = input(&layer);
    let expected = values(layer.forward(x.clone()));
    let fresh = || -> DynamicMaskAttention {
        let other = config().init(&device);
        assert_ne!(values(other.forward(x.clone())), expected);
        other
    };
    let folder = std::env::temp_dir().join(format!("burn-flash-dma-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();

    let path = folder.join("layer.bpk");
    layer.clone().into_record().save(&path).unwrap();
    let record = burn::store::ModuleRecord::load(&path).unwrap();
    let loaded = fresh().load_record(record);
    assert_eq!(values(loaded.forward(x.clone())), expected);

    let path = folder.join("layer.safetensors");
    layer
        .save_into(&mut SafetensorsStore::from_file(&path))
        .unwrap();
    let mut loaded = fresh();
    let result = loaded
        .load_from(&mut SafetensorsStore::from_file(&path))
        .unwrap();
    let all = result.missing.is_empty() && result.unused.is_empty();
    assert!(all, "{result}");
    assert_eq!(values(loaded.forward(x)), expected);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A layer with biases none of which is zero.
fn biased(config: &DynamicMaskAttentionConfig, device: &Device) -> DynamicMaskAttention {
    struct Shift;
    impl ModuleMapper for Shift {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match D {
                1 => param.map(|value| {
                    let shift = Distribution::Uniform(0.2, 0.7);
                    (value.random_like(shift) - 0.1).require_grad()
                }),
                _ => param,
            }
        }
    }
    config
        .clone()
        .with_bias(true)
        .with_initializer(SPREAD)
        .init(device)
        .map(&mut Shift)
}

#[test]
fn biases_are_those_of_the_projections_and_of_the_steps() {
    let config = config().with_scores(Scores::Dma);
    let layer = biased(
        &config.with_qk_norm(QkNorm::None),
        &Device::flex().autodiff(),
    );
    let Scorer::Zoh(zoh) = layer.scorer() else {
        panic!("another form");
    };
    let bias = zoh.dt_bias.clone().expect("a layer with biases has one");
    let x = input(&layer);

    // The scores by Burn's own operations.
    let steps = layer
        .v_proj
        .forward(x.clone())
        .matmul(zoh.dt_proj.val().transpose().unsqueeze());
    let steps = softplus(steps + bias.val().unsqueeze(), 1.0);
    let scores = (steps * zoh.a.val().unsqueeze()).exp().swap_dims(1, 2);
    for (ours, theirs) in values(layer.scores(x.clone())).iter().zip(values(scores)) {
        assert!((ours - theirs).abs() < 1e-5 * theirs.abs().max(1.0));
    }

    // The bias of the output is added to every row, and every other bias changes it.
    let out = layer.forward(x.clone());
    let mut without = layer.clone();
    let last = without.o_proj.bias.take().expect("it has one, too");
    let moved = without.forward(x) + last.val().unsqueeze();
    within(&values(out.clone()), &values(moved), 1e-5, "out");
    let grads = out.square().sum().backward();
    let projections = [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj];
    let biases = projections.map(|projection| projection.bias.as_ref().expect("a bias"));
    for bias in biases.into_iter().chain([&bias]) {
        let slope = grad(&bias.val(), &grads);
        let learns = slope.iter().all(|&x| x != 0.0 && x.is_finite());
        assert!(learns, "{slope:?}");
    }
}

#[test]
fn the_norms_of_q_and_k_add_the_epsilon_of_the_configuration() {
    let epsilon = |config: DynamicMaskAttentionConfig| {
        let layer = config.init(&Device::flex());
        [layer.q_norm, layer.k_norm].map(|norm| norm.expect("a norm").epsilon)
    };
    assert_eq!(epsilon(config()), [1e-5; 2]);
    assert_eq!(epsilon(config().with_qk_norm(QkNorm::Rms(0.5))), [0.5; 2]);
}

#[test]
fn a_configuration_without_a_field_has_the_default_or_does_not_load() {
    let new = DynamicMaskAttentionConfig::new(WIDTH, 4);
    let saved = serde_json::to_value(&new).expect("it is JSON");
    for field in saved.as_object().expect("it has fields").keys() {
        let mut without = saved.clone();
        without.as_object_mut().expect("fields").remove(field);
        match serde_json::from_value::<DynamicMaskAttentionConfig>(without) {
            Ok(loaded) => assert_eq!(loaded.to_string(), new.to_string(), "{field}"),
            Err(error) => assert!(error.to_string().contains(field), "{field}: {error}"),
        }
    }
}

#[test]
fn a_configuration_survives_its_file() {
    use burn::config::Config;
    let path = std::env::temp_dir().join(format!("burn-flash-dma-{}.json", std::process::id()));
    config().save(&path).unwrap();
    let loaded = DynamicMaskAttentionConfig::load(&path).unwrap();
    assert_eq!(loaded.to_string(), config().to_string());
    std::fs::remove_file(&path).unwrap();
}

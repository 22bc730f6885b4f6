//! The attention layer: shapes, where its gradients reach, refusals, and saving and loading.

use crate::case::values;
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, ScoreForm, Scorer};
use burn_store::{ModuleSnapshot, SafetensorsStore};

fn config() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(5))
        .with_max_seq_len(Some(64))
}

fn input(device: &Device) -> Tensor<3> {
    Tensor::random([2, 19, 32], Distribution::Normal(0.0, 1.0), device)
}

#[test]
fn a_layer_keeps_its_shape_with_every_option() {
    let device = Device::flex();
    for config in [
        DynamicMaskAttentionConfig::new(32, 4),
        config(),
        config().with_qk_norm(false).with_max_seq_len(None),
        config().with_head_dim(Some(16)).with_softcap(Some(5.0)),
        config().with_causal(false).with_n_kv_heads(Some(1)),
    ] {
        let out = config.init(&device).forward(input(&device));
        assert_eq!(out.dims(), [2, 19, 32]);
        assert!(values(out).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn every_parameter_gets_a_gradient_at_the_first_step() {
    let device = Device::flex().autodiff();
    for form in [ScoreForm::Zoh, ScoreForm::Linear] {
        let layer = config().with_score_form(form).init(&device);
        let grads = layer.forward(input(&device)).square().sum().backward();
        let projections = [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj];
        for projection in projections {
            let grad = values(projection.weight.val().grad(&grads).unwrap());
            assert!(grad.iter().any(|&x| x != 0.0));
            assert!(grad.iter().all(|x| x.is_finite()));
        }
        // Every head of the scores learns.
        match layer.scorer() {
            Scorer::Zoh(zoh) => {
                let a = values(zoh.a.val().grad(&grads).unwrap());
                assert!(a.iter().all(|&x| x != 0.0 && x.is_finite()), "{a:?}");
                let dt = values(zoh.dt_proj.val().grad(&grads).unwrap());
                assert!(dt.chunks(16).all(|head| head.iter().any(|&x| x != 0.0)));
            }
            Scorer::Linear(linear) => {
                let grad = values(linear.score_proj.val().grad(&grads).unwrap());
                assert!(grad.iter().all(|&x| x != 0.0 && x.is_finite()), "{grad:?}");
            }
        }
    }
}

#[test]
fn bad_configurations_are_refused() {
    let device = Device::flex();
    let refused = |config: DynamicMaskAttentionConfig| config.try_init(&device).unwrap_err();
    let (q_heads, kv_heads) = (4, 3);
    let error = refused(config().with_n_kv_heads(Some(3)));
    assert_eq!(error, AttentionError::HeadRatio { q_heads, kv_heads });
    let error = refused(config().with_head_dim(Some(12)));
    assert_eq!(error, AttentionError::HeadDim { head_dim: 12 });
    assert_eq!(
        refused(config().with_keep_window(Some(0))),
        AttentionError::ZeroWindow
    );
    let error = refused(config().with_softcap(Some(0.0)));
    assert!(matches!(error, AttentionError::Softcap { .. }));
}

#[test]
fn records_and_safetensors_restore_a_layer() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = input(&device);
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
    assert!(
        result.missing.is_empty() && result.unused.is_empty(),
        "{result}"
    );
    assert_eq!(values(loaded.forward(x)), expected);
    std::fs::remove_dir_all(&folder).unwrap();
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

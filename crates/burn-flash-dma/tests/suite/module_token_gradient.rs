//! What tokens learn through their scores: that a factor changes nothing else, and what is refused.

use crate::case::values;
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, ScoreForm, Scorer};
use burn_flash_dma::{AttentionError, ScoreRole};

fn config(form: ScoreForm, role: ScoreRole) -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(5))
        .with_runners_up(Some(3))
        .with_score_form(form)
        .with_score_role(Some(role))
}

/// The output and the gradients of the tokens and of the projection that makes the scores.
fn pass(layer: &DynamicMaskAttention, x: &Tensor<3>) -> [Vec<f64>; 3] {
    let x = x.clone().detach().require_grad();
    let out = layer.forward(x.clone());
    let grads = out.clone().powi_scalar(2).sum().backward();
    let projection = match layer.scorer() {
        Scorer::Linear(scorer) => &scorer.score_proj,
        Scorer::Zoh(scorer) => &scorer.dt_proj,
    };
    [
        values(out),
        values(x.grad(&grads).expect("the tokens are tracked")),
        values(projection.val().grad(&grads).expect("it is tracked")),
    ]
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        assert!(
            (a - e).abs() <= 1e-4 * (1.0 + e.abs()),
            "{what}: {a} is not {e}"
        );
    }
}

#[test]
fn it_is_a_factor_on_what_tokens_learn_through_scores_and_on_nothing_else() {
    let device = Device::flex().autodiff();
    for (form, role) in [
        (ScoreForm::Linear, ScoreRole::Rank),
        (ScoreForm::Linear, ScoreRole::RankAndBias),
        (ScoreForm::Zoh, ScoreRole::RankAndBias),
    ] {
        let config = config(form, role);
        let layer = config.init(&device);
        let x = Tensor::random([2, 33, 32], Distribution::Normal(0.0, 1.0), &device);
        let scaled = |scale| {
            let config = config.clone().with_token_gradient_scale(Some(scale));
            let scaled = config
                .init(&device)
                .load_record(layer.clone().into_record());
            pass(&scaled, &x)
        };
        let [out, whole, projection] = pass(&layer, &x);
        let detached = layer.scores(x.clone()).detach();
        let leaf = x.clone().require_grad();
        let grads = (layer
            .forward_with_scores(leaf.clone(), detached)
            .powi_scalar(2)
            .sum())
        .backward();
        let attended = values(leaf.grad(&grads).expect("the tokens are tracked"));
        assert_ne!(whole, attended, "{form:?}: tokens learn through scores");

        for scale in [0.0, 1.0, 3.0] {
            let [scaled_out, tokens, scaled_projection] = scaled(scale);
            assert_eq!(scaled_out, out, "{form:?} {scale}");
            if scale > 0.0 {
                close(&scaled_projection, &projection, "the projection");
            }
            let expected: Vec<f64> = (whole.iter().zip(&attended))
                .map(|(whole, attended)| attended + scale * (whole - attended))
                .collect();
            close(&tokens, &expected, "the tokens");
        }
    }
}

#[test]
fn what_is_no_factor_is_refused() {
    let device = Device::flex();
    let config = config(ScoreForm::Linear, ScoreRole::Rank);
    for scale in [-1.0, f64::NAN, f64::INFINITY, 1e39] {
        let config = config.clone().with_token_gradient_scale(Some(scale));
        let error = config.try_init(&device).expect_err("it is refused");
        assert!(
            matches!(error, AttentionError::GradientScale { .. }),
            "{error}"
        );
    }
}

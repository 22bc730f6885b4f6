//! What tokens learn through their scores: that a factor changes nothing else, and what is refused.

use crate::case::{grad, near, refused, values};
use crate::layer::{self, like, of_scores, tokens_for};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, ScoreForm};

fn config(form: ScoreForm, role: ScoreRole) -> DynamicMaskAttentionConfig {
    layer::config()
        .with_runners_up(Some(3))
        .with_score_form(form)
        .with_score_role(Some(role))
}

/// The output and the gradients of the tokens and of the projection that makes the scores.
fn pass(layer: &DynamicMaskAttention, x: &Tensor<3>) -> [Vec<f64>; 3] {
    let x = x.clone().detach().require_grad();
    let out = layer.forward(x.clone());
    let grads = out.clone().powi_scalar(2).sum().backward();
    [values(out), grad(&x, &grads), of_scores(layer, &grads)]
}

#[test]
fn it_is_a_factor_on_what_tokens_learn_through_scores_and_on_nothing_else() {
    for (form, role) in [
        (ScoreForm::Linear, ScoreRole::Rank),
        (ScoreForm::Linear, ScoreRole::RankAndBias),
        (ScoreForm::Zoh, ScoreRole::RankAndBias),
    ] {
        let config = config(form, role);
        let layer = config.init(&Device::flex().autodiff());
        let x = tokens_for(&layer, 2, 33);
        let scaled = |scale| {
            let config = config.clone().with_token_gradient_scale(Some(scale));
            pass(&like(&layer, &config), &x)
        };
        let [out, whole, projection] = pass(&layer, &x);
        let detached = layer.scores(x.clone()).detach();
        let leaf = x.clone().require_grad();
        let attending = layer.forward_with_scores(leaf.clone(), detached);
        let attended = grad(&leaf, &attending.powi_scalar(2).sum().backward());
        assert_ne!(whole, attended, "{form:?}: tokens learn through scores");

        for scale in [0.0, 1.0, 3.0] {
            let [scaled_out, tokens, scaled_projection] = scaled(scale);
            assert_eq!(scaled_out, out, "{form:?} {scale}");
            if scale > 0.0 {
                near(&scaled_projection, &projection, 1e-4, "the projection");
            }
            let expected: Vec<f64> = (whole.iter().zip(&attended))
                .map(|(whole, attended)| attended + scale * (whole - attended))
                .collect();
            near(&tokens, &expected, 1e-4, "the tokens");
        }
    }
}

#[test]
fn what_is_no_factor_is_refused() {
    let config = config(ScoreForm::Linear, ScoreRole::Rank);
    for scale in [-1.0, f64::NAN, f64::INFINITY, 1e39] {
        let config = config.clone().with_token_gradient_scale(Some(scale));
        refused(config.try_init(&Device::flex()), "GradientScale");
    }
}

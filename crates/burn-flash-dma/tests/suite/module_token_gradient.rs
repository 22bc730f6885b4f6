//! Gradients of tokens through their scores; a layer without them learns everything else.

use crate::case::{grad, near, values};
use crate::layer::{self, like, of_scores, tokens_for};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, ScoreLearning, Scores};

/// The output and the gradients of the tokens and of the score projection.
fn pass(layer: &DynamicMaskAttention, x: &Tensor<3>) -> [Vec<f64>; 3] {
    let x = x.clone().detach().require_grad();
    let out = layer.forward(x.clone());
    let grads = out.clone().powi_scalar(2).sum().backward();
    [values(out), grad(&x, &grads), of_scores(layer, &grads)]
}

#[test]
fn tokens_learn_through_scores_or_by_attention_alone_and_nothing_else_changes() {
    for scores in [Scores::Ranking, Scores::Dma, Scores::Added] {
        let config = layer::config().with_scores(scores);
        let learning = ScoreLearning::new()
            .with_runners_up(Some(3))
            .with_tokens(true);
        let layer =
            (config.clone().with_learning(Some(learning.clone()))).init(&Device::flex().autodiff());
        let without = like(
            &layer,
            &config.with_learning(Some(learning.with_tokens(false))),
        );
        let x = tokens_for(&layer, 2, 33);
        let [out, whole, projection] = pass(&layer, &x);
        let detached = layer.scores(x.clone()).detach();
        let leaf = x.clone().require_grad();
        let attending = layer.forward_with_scores(leaf.clone(), detached);
        let attended = grad(&leaf, &attending.powi_scalar(2).sum().backward());
        assert_ne!(whole, attended, "{scores:?}: tokens learn through scores");

        let [same_out, tokens, same_projection] = pass(&without, &x);
        assert_eq!(same_out, out, "{scores:?}");
        near(&same_projection, &projection, 1e-4, "the projection");
        near(&tokens, &attended, 1e-4, "the tokens");
    }
}

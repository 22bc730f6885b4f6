//! What several tests of the layer ask.

use crate::case::values;
use burn::tensor::Gradients;
use burn_flash_dma::nn::{DynamicMaskAttention, Scorer};

/// The gradient of the projection that makes a layer's linear scores.
pub fn of_linear_scores(layer: &DynamicMaskAttention, grads: &Gradients) -> Vec<f64> {
    let Scorer::Linear(scorer) = layer.scorer() else {
        panic!("linear scores are the default");
    };
    values(scorer.score_proj.val().grad(grads).expect("tracked"))
}

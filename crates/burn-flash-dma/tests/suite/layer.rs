//! What several tests of the layer ask.

use crate::case::values;
use burn::tensor::Gradients;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Scorer};

/// The gradient of the projection that makes a layer's linear scores.
pub fn of_linear_scores(layer: &DynamicMaskAttention, grads: &Gradients) -> Vec<f64> {
    let Scorer::Linear(scorer) = layer.scorer() else {
        panic!("linear scores are the default");
    };
    values(scorer.score_proj.val().grad(grads).expect("tracked"))
}

/// A configuration as one from before it had these fields was saved, loaded again.
pub fn saved_before(
    config: &DynamicMaskAttentionConfig,
    fields: &[&str],
) -> DynamicMaskAttentionConfig {
    let mut saved = serde_json::to_value(config).expect("it is JSON");
    let written = saved.as_object_mut().expect("it has fields");
    for field in fields {
        written.remove(*field).expect("the field is written");
    }
    serde_json::from_value(saved).expect("it loads")
}

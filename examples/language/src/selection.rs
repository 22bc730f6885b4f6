//! What the layers of a model select.

use burn::tensor::{Int, Tensor};
use burn_flash_dma::{AttentionError, Intervals};
use serde::{Deserialize, Serialize};
use train_text::model::TextModel;

/// What a layer selects.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerStatistics {
    /// Keys that a position attends to, in the mean.
    pub alive: f64,
    /// Positions that attend to a key, in the mean over the keys that any attends to.
    pub lifetime: f64,
    /// The share of keys that no position attends to.
    pub never_alive: f64,
    /// The share of attended pairs whose key is recent by the rule.
    pub recent: f64,
    /// The share of positions at which an index decides in place of a score.
    pub ties: f64,
    /// The standard deviation of all scores; `None` if it is not finite.
    pub spread: Option<f64>,
}

/// The statistics of each layer on texts `[batch, tokens]`; `None` of a layer that attends to all keys.
///
/// # Errors
///
/// [`AttentionError`] if the device fails.
pub fn statistics(
    model: &TextModel,
    texts: Tensor<2, Int>,
) -> Result<Vec<Option<LayerStatistics>>, AttentionError> {
    let layers = model.selections(texts)?;
    let of = |(intervals, scores): (Intervals, Tensor<3>)| {
        let stats = intervals.stats();
        let ties = intervals.tie_rate(&scores);
        let spread = scores.flatten::<1>(0, 2).var(0).sqrt();
        LayerStatistics {
            alive: stats.mean_alive,
            lifetime: stats.mean_lifetime,
            never_alive: stats.never_alive,
            recent: stats.recent,
            ties,
            spread: Some(f64::from(spread.into_scalar::<f32>()))
                .filter(|spread| spread.is_finite()),
        }
    };
    Ok(layers.into_iter().map(|layer| layer.map(of)).collect())
}

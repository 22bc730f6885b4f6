//! What the layers of a model select.

use crate::recall::evaluate::Facts;
use burn::tensor::Tensor;
use burn_flash_dma::Intervals;
use serde::{Deserialize, Serialize};

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
    /// The share of positions at which an index decides in place of a score; `None` without scores.
    pub ties: Option<f64>,
    /// The standard deviation of all scores; `None` without any, or if it is not finite.
    pub spread: Option<f64>,
    /// Of recall: the facts that it keeps.
    #[serde(flatten)]
    pub facts: Option<Facts>,
}

impl LayerStatistics {
    /// Of a selection by these scores `[batch, kv_heads, len]`.
    pub fn of(intervals: &Intervals, scores: Option<&Tensor<3>>) -> Self {
        let stats = intervals.stats();
        let spread = scores.map(|scores| {
            let scores = scores.clone().flatten::<1>(0, 2);
            f64::from(scores.var(0).sqrt().into_scalar::<f32>())
        });
        Self {
            alive: stats.mean_alive,
            lifetime: stats.mean_lifetime,
            never_alive: stats.never_alive,
            recent: stats.recent,
            ties: scores.map(|scores| intervals.tie_rate(scores)),
            spread: spread.filter(|spread| spread.is_finite()),
            facts: None,
        }
    }
}

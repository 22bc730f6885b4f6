//! Statistics of layers' selections.

use crate::recall::evaluate::Facts;
use burn::tensor::Tensor;
use burn_flash_dma::Intervals;
use serde::{Deserialize, Serialize};

/// Statistics of a layer's selection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerStatistics {
    /// Mean number of keys that a position attends to.
    pub alive: f64,
    /// Mean number of positions that attend to a key, over the keys with any.
    pub lifetime: f64,
    /// Share of keys that no position attends to.
    pub never_alive: f64,
    /// Share of attended pairs whose key is recent by the rule.
    pub recent: f64,
    /// Share of positions at which an index decides instead of a score; `None` without scores.
    pub ties: Option<f64>,
    /// Standard deviation of all scores; `None` without any, or if it is not finite.
    pub spread: Option<f64>,
    /// Recall only: facts that it keeps.
    #[serde(flatten)]
    pub facts: Option<Facts>,
}

impl LayerStatistics {
    /// Statistics of a selection by these scores `[batch, kv_heads, len]`.
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

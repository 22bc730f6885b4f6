//! Modules.

mod attention;
mod by_position;
mod cached;
mod cross;
mod cross_config;
mod dropout;
mod gradient_scale;
mod heads;
mod inline;
mod input;
mod masked;
pub mod mha;
mod pairs;
mod rope;
mod scorer;
mod sink;

pub use attention::{DynamicMaskAttention, DynamicMaskAttentionConfig};
pub use by_position::RoundRobin;
pub use cross::{CrossKeys, DynamicMaskCrossAttention};
pub use cross_config::DynamicMaskCrossAttentionConfig;
pub use input::DynamicMaskInput;
pub use masked::{MaskedAttentionLayer, MaskedAttentionLayerConfig, MaskedInput};
pub use scorer::{LinearScorer, ScoreForm, Scorer, ZohScorer};

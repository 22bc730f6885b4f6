//! Modules.

mod attention;
mod by_position;
mod cached;
mod config;
mod cross;
mod dropout;
mod heads;
mod inline;
mod input;
mod masked;
pub mod mha;
mod pairs;
mod scorer;

#[cfg(feature = "autodiff")]
pub(crate) use attention::{Carry, PartDocuments, PartPass, PartRanks, PartSelection};
pub use attention::{DynamicMaskAttention, DynamicMaskAttentionConfig};
pub use config::{Logits, QkNorm, Rope, ScoreLearning, Selection};
pub use cross::{CrossKeys, DynamicMaskCrossAttention, DynamicMaskCrossAttentionConfig};
pub use input::DynamicMaskInput;
pub use masked::{MaskedAttentionLayer, MaskedAttentionLayerConfig, MaskedInput};
pub use scorer::{LinearScorer, Scorer, Scores, ZohScorer};

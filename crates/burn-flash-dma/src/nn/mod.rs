//! Modules.

mod attention;
mod cached;
mod dropout;
mod inline;
mod input;
mod pairs;
mod rope;
mod scorer;

pub use attention::{DynamicMaskAttention, DynamicMaskAttentionConfig};
pub use input::DynamicMaskInput;
pub use scorer::{LinearScorer, ScoreForm, Scorer, ZohScorer};

//! Modules.

mod attention;
mod cached;
mod rope;

pub use attention::{DynamicMaskAttention, DynamicMaskAttentionConfig};

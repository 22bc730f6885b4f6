//! Modules.

mod attention;

pub use attention::{DynamicMaskAttention, DynamicMaskAttentionConfig};

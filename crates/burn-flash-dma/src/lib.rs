//! Trainable dynamic-mask sparse attention for [Burn](burn): every query attends only to the keys
//! that learned importance scores rank highest.
#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backends;
pub mod fallback;
mod functions;
pub mod nn;
pub mod ops;
mod selection;
mod validate;
mod zoh;

pub use flash_dma_problem::{
    AttentionError, AttentionOptions, ElementType, Interval, Problem, TensorName, cost,
};
pub use functions::{
    attention, attention_with_lse, dynamic_mask_attention, dynamic_mask_attention_with_intervals,
    dynamic_mask_attention_with_lse, flash_dma_attention, try_attention, try_attention_with_lse,
    try_dynamic_mask_attention, try_dynamic_mask_attention_with_intervals,
    try_dynamic_mask_attention_with_lse, try_flash_dma_attention,
};
pub use selection::{Intervals, select, try_select};
pub use zoh::{try_zoh_scores, zoh_scores};

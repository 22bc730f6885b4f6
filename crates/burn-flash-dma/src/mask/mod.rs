//! Masks, key ranges and tile plans.

mod builders;
pub(crate) mod plan;
pub(crate) mod polarity;
pub(crate) mod ranges;

pub use builders::BlockRule;
pub use plan::TilePlan;
pub use polarity::AttentionMask;
pub use ranges::KeyRanges;

//! Masks, and the forms that they are cut into.

pub(crate) mod builders;
pub(crate) mod plan;
pub(crate) mod ranges;

pub use builders::BlockRule;
pub use plan::{AttentionMask, TilePlan};
pub use ranges::KeyRanges;

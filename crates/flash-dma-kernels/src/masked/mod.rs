//! Attention under an arbitrary mask and bias.
//!
//! [`plan`](plan()) packs a mask into bits and counts the visible pairs of its blocks, and [`plan_ranges`] does so for
//! ranges of keys without a mask; the attention kernels
//! skip the blocks that count nothing. The portable kernels of this module share the tiles of
//! [`crate::tile`]; a row sees a tile of at most 32 keys through one word of bits.

mod args;
mod backward;
mod bias;
mod dkdv;
mod dq;
mod forward;
mod gather;
mod launch;
mod lists;
mod pack;
mod plan;
mod query_lists;
mod ranges;
mod rows;
mod seen;
#[cfg(test)]
mod tests;
mod words;

pub use args::{MaskBits, MaskedGradients, MaskedInputs};
pub use backward::{
    masked_backward, masked_backward_engine, masked_backward_on, masked_backward_workspace,
    masked_backward_workspace_on,
};
pub use launch::{
    masked_forward, masked_forward_engine, masked_forward_on, masked_forward_workspace,
    masked_forward_workspace_on,
};
pub use plan::{plan, plan_ranges};

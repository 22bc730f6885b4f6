//! CubeCL kernels of dynamic-mask attention: selection, forward, backward and decoding. Knows nothing of Burn.
#![warn(missing_docs)]

mod args;
mod backward;
#[cfg(feature = "codegen")]
pub mod codegen;
mod cpu;
mod decode;
mod faults;
mod forward;
mod lists;
mod masked;
mod peak;
mod planning;
mod scratch;
mod select;
mod team;
#[cfg(test)]
mod testing;
mod tile;

pub use args::{Gradients, Inputs, Saved, Selection};
pub use backward::{
    backward, backward_engine, backward_on, backward_workspace, backward_workspace_on,
};
pub use decode::{
    Cache, Pages, Slots, Tokens, append, append_pages, chunk_keys, decode, decode_engine,
    decode_on, decode_pages, decode_workspace, decode_workspace_on,
};
#[doc(hidden)]
pub use decode::{DecodeTuning, decode_tuned};
pub use faults::check;
pub use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, ElementType,
    MaskedProblem, PlanGeometry, Problem, Storage, contiguous_strides, memory::Passes,
};
pub use forward::{
    ENGINE_VARIABLE, Engine, forward, forward_engine, forward_on, forward_workspace,
    forward_workspace_on,
};
#[doc(hidden)]
pub use forward::{Tuning, forward_tuned};
#[doc(hidden)]
pub use lists::list_all;
pub use masked::{
    MaskBits, MaskedGradients, MaskedInputs, masked_backward, masked_backward_engine,
    masked_backward_on, masked_backward_workspace, masked_backward_workspace_on, masked_forward,
    masked_forward_engine, masked_forward_on, masked_forward_workspace,
    masked_forward_workspace_on, plan, plan_ranges,
};
#[doc(hidden)]
pub use peak::{Peak, peak_of};
pub use planning::{largest_batch, longest, required_bytes};
pub use select::{select, select_workspace};
#[doc(hidden)]
pub use tile::wgmma::products_alone;

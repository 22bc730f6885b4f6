//! CubeCL kernels of dynamic-mask attention: selection, forward, backward and decoding. Knows nothing of Burn.
#![warn(missing_docs)]

mod args;
mod backward;
#[cfg(feature = "codegen")]
pub mod codegen;
mod decode;
mod finite;
mod forward;
mod host;
mod math;
mod matrix;
mod pattern;
mod planning;
mod portable;
mod select;
mod team;
#[cfg(test)]
mod testing;
mod vectors;

pub use args::{Gradients, Inputs, Saved, Selection};
pub use backward::launch::{backward, backward_engine, backward_on};
pub use backward::masked::{
    masked_backward, masked_backward_engine, masked_backward_on, masked_backward_workspace,
    masked_backward_workspace_on,
};
pub use backward::workspace::{backward_workspace, backward_workspace_on};
pub use decode::append::{append, append_pages};
pub use decode::args::{Cache, Pages, Slots, Tokens};
pub use decode::chunk::chunk_keys;
#[doc(hidden)]
pub use decode::launch::{DecodeTuning, decode_tuned};
pub use decode::launch::{decode, decode_engine, decode_on, decode_pages};
pub use decode::workspace::{decode_workspace, decode_workspace_on};
pub use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, ElementType,
    MaskedProblem, PlanGeometry, Problem, Storage, contiguous_strides, memory::Passes,
};
#[doc(hidden)]
pub use forward::launch::{Tuning, forward_tuned};
pub use forward::launch::{
    forward, forward_engine, forward_on, forward_workspace, forward_workspace_on,
};
pub use forward::masked::{
    masked_forward, masked_forward_engine, masked_forward_on, masked_forward_workspace,
    masked_forward_workspace_on,
};
pub use host::engine::{ENGINE_VARIABLE, Engine};
pub use host::faults::check;
#[doc(hidden)]
pub use host::peak::{Peak, peak_of};
#[doc(hidden)]
pub use matrix::wgmma::alone::products_alone;
#[doc(hidden)]
pub use pattern::intervals::list_all;
pub use pattern::mask::args::{MaskBits, MaskedGradients, MaskedInputs};
pub use pattern::mask::plan::{plan, plan_ranges};
pub use planning::{largest_batch, longest, required_bytes};
pub use select::{select, select_workspace};

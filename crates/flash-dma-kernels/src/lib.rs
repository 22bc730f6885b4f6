//! CubeCL kernels of dynamic-mask attention: selection, forward, backward and decoding. Independent of Burn.
//!
//! Every pass is planned and then run: `problem.plan_forward(&client, &inputs, None)?.run(outputs)?`. The [`Plan`] knows
//! the engine and the memory that the pass needs.
#![warn(missing_docs)]

mod alibi;
mod args;
mod backward;
#[cfg(feature = "codegen")]
pub mod codegen;
pub mod decode;
mod dropout;
mod finite;
mod forward;
mod gating;
mod host;
#[cfg(feature = "internals")]
pub mod internals;
mod linear_scores;
mod losses;
mod math;
mod matrix;
mod norm;
mod pattern;
mod planning;
mod portable;
pub mod product;
mod rank_terms;
mod report;
mod row_sums;
mod select;
mod team;
#[cfg(test)]
mod testing;
mod update;
mod vectors;
mod zoh;

pub use args::{Gradients, Inputs, Outputs, RankLearning, Saved, Selection};
pub use backward::Backward;
pub use decode::append::{append, append_pages};
pub use decode::args::{Cache, ChunkOutputs, Pages, Slots, StepInputs, StepOutputs, Tokens};
pub use decode::chunk::chunk_keys;
pub use flash_dma_problem::{
    AdamWStep, AlibiSlopes, AppendProblem, Appending, AttentionError, AttentionOptions, CacheShape,
    DecodeProblem, Dropout, ElementType, EngineChoice, EngineReport, KeptKeys, MaskedProblem,
    NormProblem, Obstacle, PassKind, PassedOver, PlanGeometry, Problem, Rotary, SQUARE_SUMS,
    ScoreRole, SelectionRule, Storage, contiguous_strides, memory::Passes,
};
pub use forward::Forward;
pub use gating::{SwigluGradients, swiglu, swiglu_backward};
pub use host::engine::{ENGINE_VARIABLE, Engine};
pub use host::faults::check;
pub use host::pass::Plan;
pub use linear_scores::{MAX_SCORE_HEADS, linear_scores, linear_scores_gradient};
pub use losses::{LossRows, losses, losses_gradient};
pub use norm::{NormGradients, NormParameters, norm_backward, norm_forward};
pub use pattern::mask::args::{MaskBits, MaskedGradients, MaskedInputs};
pub use pattern::mask::plan::{plan, plan_ranges};
pub use planning::{largest_batch, longest, required_bytes};
pub use report::{Reported, check_engine, engine_for, engines, fits_grid};
pub use select::{select, select_workspace};
pub use update::{ParameterUpdate, adamw, add_squares, scale};
pub use zoh::{ZohParameters, zoh_scores};

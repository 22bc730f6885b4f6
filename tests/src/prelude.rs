//! The imports of most tests.

pub use crate::engine::{shared, skip};
#[cfg(feature = "burn")]
pub use crate::engines::{Backend, Burn};
#[cfg(feature = "kernels")]
pub use crate::engines::{Kernels, Target};
pub use crate::expected::Expected;
pub use crate::masked::{MaskedCall, MaskedCase, MaskedEngine, Pattern};
pub use crate::{Call, Case, Engine, Gradients, Grads, Layout, Outputs, Raw, Size, problem};
pub use crate::{
    every_burn, every_engine, every_runtime, fast_burn, kernel_engines, kernel_runtimes,
    matrix_engines, on_burn_cpu, raw_engines, tensor_core_engines,
};
pub use flash_dma_problem::ElementType::{self, Bf16, F16, F32};
pub use flash_dma_problem::{
    AlibiSlopes, AttentionError, AttentionOptions, Dropout, Interval, Problem, ScoreRole,
    SelectionRule,
};
pub use flash_dma_reference::generate::{self, Scores};
pub use flash_dma_reference::masked::{Broadcast, MaskedInputs};
pub use flash_dma_reference::{Inputs, Rng};

/// The element types.
pub const TYPES: [ElementType; 3] = [F32, F16, Bf16];

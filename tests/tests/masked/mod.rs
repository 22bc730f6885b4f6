//! Attention under masks and biases, against the oracle.

mod broadcasts;
#[cfg(feature = "burn")]
mod burn;
mod grid;
mod not_finite;
mod plans;
mod random;
mod refusals;
mod rows;
mod tensor_cores;
mod tiles;

use flash_dma_tests::prelude::*;

/// Element types with head dimensions: those of the portable kernels, and of the tensor-core engines if there are any.
/// A device compiles kernels for longer than it runs them, so these tests share few of them.
fn kinds<E: MaskedEngine>() -> Vec<(ElementType, usize)> {
    E::cases([(F32, 8)], [(Bf16, 64)], [(F16, 128)])
}

//! The forward pass: the choice of the engine, the slices of a pass, and the tensor-core kernels.

pub(crate) mod launch;
pub(crate) mod masked;
pub(crate) mod matrix;
pub(crate) mod merge;
pub(crate) mod mma;
pub(crate) mod split;
#[cfg(test)]
mod tests;
pub(crate) mod wgmma;

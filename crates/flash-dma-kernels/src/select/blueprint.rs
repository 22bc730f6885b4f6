//! The configuration of the selection by blocks.

use crate::team::Team;

/// What is fixed when the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlocksBlueprint {
    /// The units of a cube; a power of two.
    pub team: Team,
    /// Positions a block; a multiple of 32.
    pub block: usize,
    /// Whether kernels may hold PTX: on CUDA, through the C++ generator.
    pub ptx: bool,
}

//! The configuration of the selection by blocks.

use crate::team::Team;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlocksBlueprint {
    /// The units of a cube; a power of two.
    pub team: Team,
    /// Positions per block; a multiple of 32.
    pub block: usize,
    /// True if kernels may contain PTX: on CUDA, through the C++ generator.
    pub ptx: bool,
}

//! The pairs of a cube's keys and the queries that stream past them.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::QueryRows;
use crate::dropout::DropoutArg;
use crate::matrix::logit_scale::LogitScale;
use cubecl::prelude::*;

/// What the pairs of a warp's keys and the queries are computed from.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Pairs {
    /// Where the rows of the queries are.
    pub rows: QueryRows,
    /// The bits and the biases of the keys.
    pub mask: KeyMask,
    pub logit_scale: LogitScale,
    /// The seed of the mask of dropout.
    pub dropout: DropoutArg,
    #[cube(comptime)]
    pub bp: DkdvBlueprint,
}

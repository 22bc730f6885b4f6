//! Compile-time configurations of the kernels of linear scores.

use crate::team::Team;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoresBlueprint {
    pub team: Team,
    pub heads: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GradientBlueprint {
    pub units: usize,
    pub heads: usize,
}

//! The gradient of the rank on tensor cores: tiles of runners-up stream the queries whose window they just miss, tiles
//! of kept keys those that keep them.

pub(crate) mod mma;
pub(crate) mod terms;
pub(crate) mod wgmma;

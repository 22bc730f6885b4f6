//! The gradient of the rank on tensor cores: tiles of runners-up stream the queries that they just miss.

pub(crate) mod mma;
pub(crate) mod wgmma;

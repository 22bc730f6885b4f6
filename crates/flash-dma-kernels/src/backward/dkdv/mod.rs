//! dK, dV and score gradients on tensor cores: a cube owns a key tile within a chunk of queries and streams the
//! queries.

pub(crate) mod blueprint;
pub(crate) mod mma;
pub(crate) mod shared;
pub(crate) mod wgmma;

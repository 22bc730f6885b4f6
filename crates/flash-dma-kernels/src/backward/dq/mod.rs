//! dQ on tensor cores: a cube owns a query tile and streams the keys of its list.

pub(crate) mod blueprint;
pub(crate) mod mma;
pub(crate) mod repair;
pub(crate) mod rows;
pub(crate) mod tile;
pub(crate) mod weights;
pub(crate) mod wgmma;

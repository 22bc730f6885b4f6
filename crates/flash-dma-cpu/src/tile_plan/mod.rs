//! Tile plans of masks: writing and reading them.

pub(crate) mod bits;
pub(crate) mod pack;

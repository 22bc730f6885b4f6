//! Tile plans of masks.

pub(crate) mod pack;

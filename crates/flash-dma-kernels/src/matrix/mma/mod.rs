//! The `mma.sync` matrix engine: tensor cores of sm_80 and newer, through CubeCL's C++ generator.

pub(crate) mod product;

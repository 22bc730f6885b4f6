//! The `mma.sync` matrix engine: tensor cores of sm_80 and newer, through CubeCL's C++ generator.

mod fragment;
mod ptx;

pub(crate) use fragment::{
    Accumulators, Chunk, multiply_pair, quad_max, quad_sum, scale_rows, set, swizzle, zeros,
};
pub(crate) use ptx::{any_lane, commit_copies, ex2, shuffle_xor, value, wait_copies};

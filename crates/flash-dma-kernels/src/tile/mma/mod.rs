//! The `mma.sync` matrix engine: tensor cores of sm_80 and newer, through CubeCL's C++ generator.

mod copies;
mod fragment;
mod product;
mod ptx;

pub(crate) use copies::copied_chunk;
pub(crate) use fragment::{
    Chunk, gathered, multiply_pair, quad_max, quad_sum, scale_rows, set, set_all, swizzle, zeros,
};
pub(crate) use product::{LanePlace, Shape, load_a, multiply, shared_address};
pub(crate) use ptx::{
    any_lane, commit_copies, copy_of_row, copy_or_zero, copy_pair, copy_word, ex2, global_address,
    read_ahead, reciprocal, shuffle, shuffle_xor, uniform, uniform_address, value, wait_copies,
};

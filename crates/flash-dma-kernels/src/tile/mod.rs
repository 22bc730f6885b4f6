//! What forward and backward share.
//!
//! All three attention kernels have one shape. A cube *owns* an outer tile (queries in forward and dq,
//! keys in dk/dv), keeps its rows in shared memory and its results in registers, and *streams* inner
//! tiles past it (keys there, queries here). Unit `(x, y)` of a cube of `units_x * units_y` holds the
//! outer rows `y + o * units_y` and the inner rows `x + i * units_x`: neighbouring units read
//! neighbouring rows, which a padded row stride spreads over the banks of shared memory.

mod blueprint;
mod check;
mod fill;
mod finite;
mod keys;
mod memory;
pub(crate) mod mma;
mod product;
mod slices;
mod softmax;
#[cfg(test)]
pub(crate) mod testing;
mod visibility;
pub(crate) mod wgmma;

pub(crate) use blueprint::{Blueprint, LANES, Pass};
#[cfg(test)]
pub(crate) use blueprint::{Micro, micro};
pub(crate) use check::{
    Layout, address_type, check_device, check_grid, check_tensor, check_type, elem_type,
    vector_size,
};
pub(crate) use fill::fill;
pub(crate) use finite::{NO_NUMBER, exponent_bits, is_finite, negative_infinity};
pub(crate) use keys::TileKeys;
pub(crate) use memory::{
    Row4, TileRows, is_finite4, load_rows, load_tile, load_vector, store_row, store_tile,
};
pub(crate) use product::{accumulate, accumulate_selected, products};
pub(crate) use slices::{Slice, for_each_slice, slice_bytes};
pub(crate) use softmax::OnlineSoftmax;
pub(crate) use visibility::{
    Pairs, PairsExpand, Slots, TANH_SERIES_BELOW, logit, logit_slope, position, tanh_near_zero,
};

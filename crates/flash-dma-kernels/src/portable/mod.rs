//! The portable kernels, which run on every CubeCL runtime.
//!
//! All attention kernels here have one shape. A cube *owns* an outer tile (queries in forward and dq,
//! keys in dk/dv), keeps its rows in shared memory and its results in registers, and *streams* inner
//! tiles past it (keys there, queries here). Unit `(x, y)` of a cube of `units_x * units_y` holds the
//! outer rows `y + o * units_y` and the inner rows `x + i * units_x`: neighbouring units read
//! neighbouring rows, which a padded row stride spreads over the banks of shared memory.
#![allow(
    missing_docs,
    clippy::new_without_default,
    reason = "`internals` re-exports cube functions: their macro writes modules without documentation, and what a \
              cube allocates has no default"
)]

pub(crate) mod alibi;
pub(crate) mod args;
pub(crate) mod bias;
pub(crate) mod bits;
pub(crate) mod blueprint;
pub(crate) mod delta;
pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod dropout;
pub(crate) mod forward;
pub(crate) mod intervals;
pub(crate) mod keys;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod product;
pub(crate) mod rank;
pub(crate) mod softmax;
pub(crate) mod tile_visibility;
pub(crate) mod visibility;

//! Products on Hopper's tensor cores: `wgmma` over tiles that the tensor memory accelerator copies.
//!
//! CubeK has no kernel on `wgmma`, the only instruction that reaches the rate of these tensor cores; its routines use
//! WMMA and `mma.sync`.

mod blueprint;
mod host;
mod instruction;
mod kernel;

pub use blueprint::Tile;
pub(crate) use host::{Plan, refusal};

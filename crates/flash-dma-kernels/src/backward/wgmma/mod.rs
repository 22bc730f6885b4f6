//! The backward pass on `wgmma`, Hopper's tensor cores: the large kernels of
//! [`mma`](super::mma), with its host side, lists and orders.

mod bias;
mod bias_steps;
mod bias_tiles;
mod dkdv;
mod dq;
mod dq_weights;
mod keys;
mod output;
mod queries;
mod steps;
mod weights;

pub(super) use bias::bias_wgmma_kernel;
pub(super) use dkdv::dkdv_wgmma_kernel;
pub(super) use dq::dq_wgmma_kernel;

//! Every CubeCL runtime, on the kernels.

mod attention;
mod cache;
mod masked;
mod norm;
mod packed;
mod product;
mod scores;
mod tensors;

use crate::ops::training::TrainingOps;
use burn_cubecl::CubeBackend;

impl TrainingOps for CubeBackend {}

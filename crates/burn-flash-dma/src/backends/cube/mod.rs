//! Every CubeCL runtime, on the kernels.

mod attention;
mod cache;
mod masked;
mod norm;
mod packed;
mod product;
mod scores;
mod tensors;
mod training;

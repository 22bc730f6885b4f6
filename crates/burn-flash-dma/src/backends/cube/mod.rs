//! Every CubeCL runtime, on the kernels.

mod attention;
mod cache;
mod masked;
mod norm;
mod product;
mod tensors;

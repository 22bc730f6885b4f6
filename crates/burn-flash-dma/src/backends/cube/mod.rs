//! Every CubeCL runtime, on the kernels.

mod attention;
mod cache;
mod masked;
mod product;
mod tensors;

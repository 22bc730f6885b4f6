//! The gradients: one node of the autodiff graph per pass.

mod attention;
mod handed;
mod masked;
mod node;
mod norm;
mod packed;
mod product;
mod recomputed;
mod training;

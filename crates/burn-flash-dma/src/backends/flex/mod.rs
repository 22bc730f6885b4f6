//! Burn's Flex backend on the CPU engine.

mod attention;
mod cache;
mod masked;
mod norm;
mod product;
mod tensors;

//! The operations in plain Burn operations: for backends without an engine, and a third opinion in the tests.
//! Attention takes `O(q_len * k_len)` memory and time; everything is computed in f32.
//!
//! They are the default bodies of the traits in [`ops`](crate::ops), which hold the contract.

mod alibi;
pub mod attention;
pub mod cache;
pub(crate) mod dropout;
mod logits;
pub mod masked;
pub mod norm;
pub mod packed;
pub mod product;
pub mod scores;
pub mod sink;
pub(crate) mod tensors;
pub mod training;

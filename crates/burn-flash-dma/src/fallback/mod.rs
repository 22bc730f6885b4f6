//! Operations other than attention in plain Burn operations: the default bodies of the traits in [`ops`](crate::ops),
//! which hold the contract. All arithmetic is f32.

pub mod norm;
pub mod packed;
pub mod product;
pub(crate) mod running;
pub mod scores;
pub mod sink;
pub(crate) mod tensors;
pub mod training;
pub mod update;

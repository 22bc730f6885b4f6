//! A kernel of one's own on the tiles of `flash-dma-kernels`: the attention mass that every key receives, the sum of
//! its probabilities over all queries that attend to it.
//!
//! The book's chapter "Write a kernel on our tiles" walks through it. `kernel` is the device's side, [`launch`] the
//! host's, [`oracle`] the statement that both are tested against.
#![warn(missing_docs)]

pub mod forward;
mod kernel;
pub mod launch;
pub mod oracle;
pub mod tensors;
pub mod timing;

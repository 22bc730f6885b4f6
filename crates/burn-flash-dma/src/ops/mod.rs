//! The operations as a backend extension: what an engine implements, below the `Tensor` API.

pub mod attention;
pub mod cache;
pub mod masked;

pub use attention::*;
pub use cache::*;
pub use masked::*;

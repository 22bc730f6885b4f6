//! The operations in plain Burn operations: for backends without an engine.

pub mod attention;
pub mod cache;
pub mod masked;

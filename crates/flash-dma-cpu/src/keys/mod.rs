//! The keys of a pass: where they lie, and which of them a tile of queries attends to.

pub(crate) mod intervals;
pub(crate) mod planned;
pub(crate) mod source;

//! The passes.

pub(crate) mod backward;
pub(crate) mod forward;
pub(crate) mod schedule;
pub(crate) mod softmax;

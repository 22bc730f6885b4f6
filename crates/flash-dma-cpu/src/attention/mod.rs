//! The passes over the queries, for any source of their keys.

pub(crate) mod backward;
pub(crate) mod bias_gradient;
mod dropout;
pub(crate) mod forward;
pub(crate) mod key_gradient;
pub(crate) mod rank;
pub(crate) mod schedule;
pub(crate) mod softmax;

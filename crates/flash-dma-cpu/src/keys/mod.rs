//! The keys of a pass: where they lie, which of them a tile of queries attends to, and the bias of its logits.

pub(crate) mod bias;
pub(crate) mod block;
pub(crate) mod intervals;
pub(crate) mod list;
pub(crate) mod planned;
pub(crate) mod source;
pub(crate) mod tile;
pub(crate) mod visibility;

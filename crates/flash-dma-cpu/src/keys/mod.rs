//! The keys of a pass: their location, the keys that a tile of queries attends to, and the bias of its logits.

pub(crate) mod bias;
pub(crate) mod block;
pub(crate) mod intervals;
pub(crate) mod operands;
pub(crate) mod planned;
pub(crate) mod tile;
pub(crate) mod visibility;

/// The keys of a chunk of queries and of one of its tiles. A key is named by its *entry*, its place in `index`.
#[derive(Default)]
pub(crate) struct KeyList {
    /// Index of each key that some query of the chunk may attend to, ascending.
    pub(crate) index: Vec<u32>,
    /// Entries of the keys that the tile attends to, in the order in which they are gathered.
    pub(crate) entries: Vec<u32>,
}

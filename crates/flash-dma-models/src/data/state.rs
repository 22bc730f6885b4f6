//! The place of a loader.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Where a [`Loader`](super::Loader) stands, and what its batches depend on. A checkpoint keeps it beside the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The batches that have been served, over all epochs.
    pub step: usize,
    /// The rows of a batch.
    pub batch: usize,
    /// The seed of the order.
    pub seed: u64,
    /// The tokens of a row.
    pub row_len: usize,
    /// The tokens of the file that rows are made of.
    pub tokens: Range<usize>,
    /// That of the file.
    pub fingerprint: u64,
}

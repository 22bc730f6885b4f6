//! The place of a loader.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Position of a [`Loader`](super::Loader), and everything its batches depend on. A checkpoint keeps it with the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Batches served, over all epochs.
    pub step: usize,
    /// Rows of a batch.
    pub batch: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Tokens of a row.
    pub row_len: usize,
    /// Tokens of the file that rows are made of.
    pub tokens: Range<usize>,
    /// Fingerprint of the file.
    pub fingerprint: u64,
}

//! The tensors of the keys that a pass reads.

use cubecl::prelude::*;

/// The tensors of the keys that a kernel reads, and of the numbers added to their logits.
#[derive(Clone, Default)]
pub(crate) struct SourceTensors {
    pub bias: Option<TensorBinding>,
    pub keys: KeyTensors,
    /// The first position at which its rank keeps each key, for a kernel in which kept keys learn.
    pub kept_from: Option<TensorBinding>,
}

/// The keys that are read, and the tensors that list them.
#[derive(Clone, Default)]
pub(crate) enum KeyTensors {
    #[default]
    All,
    /// Intervals, lists and counts.
    Intervals([TensorBinding; 3]),
    /// Bits, lists and counts.
    Planned([TensorBinding; 3]),
}

/// The query tiles of one launch, and their keys.
pub(crate) struct TileLaunch {
    pub source: SourceTensors,
    pub first: usize,
    /// Number of query tiles, the size of the grid along x.
    pub count: usize,
}

impl SourceTensors {
    pub(crate) fn all(&self) -> impl Iterator<Item = &TensorBinding> {
        let keys: &[TensorBinding] = match &self.keys {
            KeyTensors::All => &[],
            KeyTensors::Intervals(tensors) | KeyTensors::Planned(tensors) => tensors,
        };
        self.bias.iter().chain(keys).chain(&self.kept_from)
    }
}

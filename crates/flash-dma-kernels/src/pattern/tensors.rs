//! The tensors of the keys that a pass on tensor cores reads.

use cubecl::prelude::*;

/// The tensors that say which keys a tensor-core kernel reads, and what is added to their logits.
#[derive(Clone)]
pub(crate) struct SourceTensors {
    /// Scores or a bias.
    pub bias: Option<TensorBinding>,
    pub keys: KeyTensors,
}

/// Which keys are read, and the tensors that say so.
#[derive(Clone)]
pub(crate) enum KeyTensors {
    All,
    /// Intervals, lists and counts.
    Intervals([TensorBinding; 3]),
    /// Bits, lists and counts.
    Planned([TensorBinding; 3]),
}

impl SourceTensors {
    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &TensorBinding> {
        let keys: &[TensorBinding] = match &self.keys {
            KeyTensors::All => &[],
            KeyTensors::Intervals(tensors) | KeyTensors::Planned(tensors) => tensors,
        };
        self.bias.iter().chain(keys)
    }

    /// The bits of the plan, if there is one.
    pub(crate) fn bits(&self) -> Option<&TensorBinding> {
        match &self.keys {
            KeyTensors::Planned([bits, ..]) => Some(bits),
            _ => None,
        }
    }
}

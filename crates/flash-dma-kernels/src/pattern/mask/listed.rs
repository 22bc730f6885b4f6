//! The data of a mask and a bias that kernels read.

use crate::host::check::rows_are_segments;
use crate::pattern::mask::args::MaskedInputs;
use crate::pattern::mask::sizes::TileLists;
use crate::pattern::mask::tile_lists::tile_lists;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{MaskedProblem, PlanGeometry};

/// Whether lists may hold single keys; with a bias of pairs they hold blocks.
pub(crate) fn gathers(problem: &MaskedProblem) -> bool {
    problem.bias.is_none() || problem.has_key_bias()
}

/// The bytes of the buffers that [`MaskedInputs::listed`] returns for tiles of `queries` queries, and of its scratch.
pub(crate) fn listed_bytes(problem: &MaskedProblem, queries: usize) -> [usize; 2] {
    let of = |geometry: PlanGeometry| TileLists::bytes(&geometry, queries, gathers(problem));
    problem.plan.map_or([0; 2], of)
}

impl MaskedInputs {
    /// Whether rows have the alignment that the tensor-core engines need, and a bias has the layout that they read.
    pub(crate) fn rows_are_segments(&self, problem: &MaskedProblem) -> bool {
        let rows = [&self.q, &self.k, &self.v];
        let size = problem.attention.element.size();
        rows.iter().all(|rows| rows_are_segments(rows, size))
            && (self.bias.as_ref())
                .is_none_or(|bias| !problem.has_key_bias() || bias.strides.last() == Some(&1))
    }

    /// The keys of the tiles of `queries` queries of a tensor-core kernel, and their bias. `watched` is k or v,
    /// whichever the kernel multiplies with weights that may be zero.
    pub(crate) fn listed(
        &self,
        client: &Client,
        problem: &MaskedProblem,
        queries: usize,
        watched: &TensorBinding,
    ) -> SourceTensors {
        let keys = match (&self.plan, &problem.plan) {
            (Some(plan), Some(geometry)) => {
                let element = problem.attention.element;
                let gather = gathers(problem);
                let lists = tile_lists(client, geometry, plan, queries, watched, element, gather);
                KeyTensors::Planned([plan.bits.clone(), lists.list, lists.counts])
            }
            _ => KeyTensors::All,
        };
        SourceTensors {
            bias: self.bias.clone(),
            keys,
        }
    }
}

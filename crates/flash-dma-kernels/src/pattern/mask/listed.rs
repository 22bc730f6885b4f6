//! The data of a mask and a bias that tensor-core kernels read.

use crate::host::check::check_segments;
use crate::host::scratch::bytes;
use crate::pattern::mask::args::MaskedInputs;
use crate::pattern::mask::sizes::Sizes;
use crate::pattern::mask::tile_lists::tile_lists;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{MaskedProblem, Obstacle};

/// True if lists may hold single keys; with a bias per pair they hold blocks.
fn gathers(problem: &MaskedProblem) -> bool {
    problem.bias.is_none() || problem.has_key_bias()
}

/// The bytes of the buffers that [`MaskedInputs::listed`] returns for tiles of `queries` queries, and of its scratch.
pub(crate) fn listed_bytes(problem: &MaskedProblem, queries: usize) -> [usize; 2] {
    problem.plan.map_or([0; 2], |geometry| {
        let sizes = Sizes::new(&geometry, queries, gathers(problem));
        let lists = bytes(sizes.list(&geometry)) + bytes(sizes.counts());
        [lists, bytes(sizes.spans())]
    })
}

impl MaskedInputs {
    /// The tensors of the problem's element type.
    pub(crate) fn rows(&self) -> [&TensorBinding; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// Refuses rows whose alignment, or a bias whose layout, the tensor-core engines cannot read.
    pub(crate) fn check_segments(&self, problem: &MaskedProblem) -> Result<(), Obstacle> {
        check_segments(self.rows(), problem.attention.element.size())?;
        match &self.bias {
            Some(bias) if problem.has_key_bias() && bias.strides.last() != Some(&1) => {
                Err(Obstacle::BiasStride)
            }
            _ => Ok(()),
        }
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
            kept_from: None,
        }
    }
}

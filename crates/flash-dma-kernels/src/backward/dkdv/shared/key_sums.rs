//! Host side of the sums that several cubes add to.

use crate::args::{Gradients, Selection};
use crate::backward::dkdv::shared::sums::{
    ClearedSumsLaunch, clear_sums_kernel, round_sums_kernel,
};
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::{bytes, one_unit_each, scratch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The f32 sums that the cubes of several chunks add to, `[batch, kv_heads, k_len, head_dim]` each.
pub(crate) struct KeySums<'a> {
    client: &'a Client,
    problem: &'a Problem,
    intervals: &'a TensorBinding,
    pub k: TensorBinding,
    pub v: TensorBinding,
}

impl<'a> KeySums<'a> {
    /// Allocates the sums, zeroed for every key that is attended to, except those whose queries are all of one chunk of
    /// `chunk`: its cube overwrites them.
    pub(crate) fn new(
        client: &'a Client,
        problem: &'a Problem,
        selection: &'a Option<Selection>,
        chunk: usize,
    ) -> Self {
        let selection = selection.as_ref().expect("chunks come with scores");
        let [k, v] = [(); 2].map(|()| scratch(client, problem.kv_shape()));
        let sums = Self {
            client,
            problem,
            intervals: &selection.intervals,
            k,
            v,
        };
        let (count, dim) = one_unit_each(client, sums.vectors());
        // SAFETY: units past the vectors return; the buffers hold them.
        unsafe {
            clear_sums_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(&[&sums.k], 4),
                sums.intervals.clone().into_buffer_arg(),
                sums.k.clone().into_buffer_arg(),
                sums.v.clone().into_buffer_arg(),
                ClearedSumsLaunch::new(sums.vectors(), problem.q_len, problem.k_len, chunk),
                problem.head_dim,
                problem.causal,
            );
        }
        sums
    }

    /// The bytes of the buffers that [`new`](Self::new) allocates.
    pub(crate) fn bytes(problem: &Problem) -> usize {
        2 * bytes(problem.kv_shape())
    }

    /// Vectors of four sums per tensor.
    fn vectors(&self) -> usize {
        self.problem.kv_shape().iter().product::<usize>() / 4
    }

    /// Rounds the sums and writes the gradients.
    pub(crate) fn round(self, grads: &Gradients) {
        let (count, dim) = one_unit_each(self.client, self.vectors());
        let size = self.problem.element.size();
        let address = address_type(&[&self.k], 4).max(address_type(&[&grads.k, &grads.v], size));
        // SAFETY: units past the vectors return; the buffers hold them.
        unsafe {
            round_sums_kernel::launch_unchecked(
                self.client,
                count,
                dim,
                address,
                self.intervals.clone().into_buffer_arg(),
                self.k.clone().into_buffer_arg(),
                self.v.clone().into_buffer_arg(),
                grads.k.clone().into_buffer_arg(),
                grads.v.clone().into_buffer_arg(),
                self.vectors(),
                self.problem.head_dim,
                elem_type(self.problem.element),
            );
        }
    }
}

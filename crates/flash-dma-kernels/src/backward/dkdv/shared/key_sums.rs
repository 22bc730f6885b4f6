//! Host side of the sums that several cubes add to.

use crate::args::{Gradients, Selection};
use crate::backward::dkdv::shared::args::GradientTensors;
use crate::backward::dkdv::shared::sums::{SumRows, clear_sums_kernel, round_sums_kernel};
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::{bytes, one_unit_each, scratch};
use crate::pattern::intervals::classes::QueryChunksLaunch;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The f32 sums that the cubes of several chunks add to, `[batch, kv_heads, k_len, head_dim]` each.
pub(crate) struct KeySums<'a> {
    client: &'a Client,
    problem: &'a Problem,
    intervals: &'a TensorBinding,
    chunk: usize,
    k: TensorBinding,
    v: TensorBinding,
}

impl<'a> KeySums<'a> {
    /// Allocates the sums, zeroed for every key that is attended to, except those whose queries are all in one chunk of
    /// `chunk`: the chunk's cube writes their gradients.
    pub(crate) fn new(
        client: &'a Client,
        problem: &'a Problem,
        selection: &'a Selection,
        chunk: usize,
    ) -> Self {
        let [k, v] = [(); 2].map(|()| scratch(client, problem.kv_shape()));
        let sums = Self {
            client,
            problem,
            intervals: &selection.intervals,
            chunk,
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
                sums.chunks(),
                sums.vectors(),
                sums.rows(),
            );
        }
        sums
    }

    /// The bytes of the buffers that [`new`](Self::new) allocates.
    pub(crate) fn bytes(problem: &Problem) -> usize {
        2 * bytes(problem.kv_shape())
    }

    /// The destinations to which the cubes write and add the gradients of k and v.
    pub(crate) fn with_gradients(&self, grads: &Gradients) -> [GradientTensors; 2] {
        [(&grads.k, &self.k), (&grads.v, &self.v)].map(|(own, sums)| GradientTensors {
            own: own.clone(),
            sums: Some(sums.clone()),
        })
    }

    /// Vectors of four sums per tensor.
    fn rows(&self) -> SumRows {
        SumRows {
            head_dim: self.problem.head_dim,
            causal: self.problem.causal,
        }
    }

    fn vectors(&self) -> usize {
        self.problem.kv_shape().iter().product::<usize>() / 4
    }

    fn chunks(&self) -> QueryChunksLaunch {
        let Problem { q_len, k_len, .. } = *self.problem;
        QueryChunksLaunch::new(q_len as u32, k_len as u32, self.chunk as u32)
    }

    /// Writes the gradients that no cube has written: the sums, rounded, and zeros.
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
                self.chunks(),
                self.vectors(),
                self.rows(),
                elem_type(self.problem.element),
            );
        }
    }
}

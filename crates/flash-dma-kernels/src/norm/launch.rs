//! Host side: the kernels that run, their number of cubes and their buffers.

use crate::host::check::{address_type, begins_at, elem_type, reads_in, widest_vector};
use crate::host::scratch::scratch;
use crate::norm::args::{NormGradients, NormParameters};
use crate::norm::blueprint::{NormBlueprint, SumsBlueprint};
use crate::norm::kernel::{
    Angles, AnglesLaunch, NormedLaunch, norm_backward_kernel, norm_forward_kernel,
};
use crate::norm::sums::gamma_gradient_kernel;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::NormProblem;

/// The most cubes of the backward pass with a norm, each of which writes a row of sums: a wave of a large GPU. It does
/// not depend on the device, nor do the results.
const SUM_ROWS: usize = 512;
/// The most cubes of the other passes: the limit of every device.
const CUBES: usize = 65535;

/// The launch parameters of both passes.
pub(crate) struct Call<'a> {
    client: &'a Client,
    problem: &'a NormProblem,
    parameters: &'a NormParameters,
    /// Elements that are read at once.
    vector: usize,
    address: AddressType,
}

impl<'a> Call<'a> {
    /// The parameters for the tensors `typed`, of the problem's element type.
    pub(crate) fn new(
        client: &'a Client,
        problem: &'a NormProblem,
        parameters: &'a NormParameters,
        typed: &[&TensorBinding],
    ) -> Self {
        let size = problem.element.size();
        let gamma = parameters.gamma.as_ref();
        let words: Vec<_> = parameters.table.iter().chain(gamma).collect();
        let vector = widest_vector(client, size, |n| {
            typed.iter().all(|t| reads_in(t, n, size))
                && gamma.is_none_or(|gamma| reads_in(gamma, n, problem.gamma.size()))
        });
        Self {
            client,
            problem,
            parameters,
            vector,
            address: address_type(typed, size).max(address_type(&words, 4)),
        }
    }

    pub(crate) fn blueprint(&self) -> NormBlueprint {
        NormBlueprint::choose(self.client, self.problem, self.vector)
    }

    #[cfg(test)]
    pub(crate) fn with_vector(self, vector: usize) -> Self {
        Self { vector, ..self }
    }

    /// Launches the forward pass of checked tensors that are not empty.
    pub(crate) fn forward(&self, x: TensorBinding, out: TensorBinding, blueprint: NormBlueprint) {
        let gamma = self.parameters.gamma.clone();
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by; rows and features
        // past the last are neither read nor written.
        unsafe {
            norm_forward_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(self.cubes(CUBES, blueprint) as u32, 1, 1),
                blueprint.cube_dim(),
                self.address,
                self.vector,
                self.table_vector(),
                x.into_tensor_arg(),
                gamma.map(TensorBinding::into_buffer_arg).into(),
                self.angles(),
                out.into_tensor_arg(),
                self.problem.epsilon.unwrap_or_default(),
                blueprint,
                elem_type(self.problem.element),
                elem_type(self.problem.gamma),
            );
        }
    }

    /// Launches the backward pass of checked tensors.
    pub(crate) fn backward(
        &self,
        x: Option<TensorBinding>,
        grad_out: TensorBinding,
        other: Option<TensorBinding>,
        grads: NormGradients,
        blueprint: NormBlueprint,
    ) {
        let blueprint = NormBlueprint {
            adds: other.is_some(),
            ..blueprint
        };
        let p = self.problem;
        let most = if blueprint.norm { SUM_ROWS } else { CUBES };
        let cubes = self.cubes(most, blueprint);
        let width = p.width;
        let sums = (blueprint.norm).then(|| scratch(self.client, [cubes, width]));
        if !p.is_empty() {
            let normed = x.zip(self.parameters.gamma.clone());
            let sums_address = address_type(&sums.iter().collect::<Vec<_>>(), 4);
            let address = self.address.max(sums_address);
            // SAFETY: as in the forward pass; the sums have a row for each cube.
            unsafe {
                norm_backward_kernel::launch_unchecked(
                    self.client,
                    CubeCount::Static(cubes as u32, 1, 1),
                    blueprint.cube_dim(),
                    address,
                    self.vector,
                    self.table_vector(),
                    grad_out.into_tensor_arg(),
                    normed
                        .map(|(x, gamma)| {
                            NormedLaunch::new(x.into_tensor_arg(), gamma.into_buffer_arg())
                        })
                        .into(),
                    self.angles(),
                    other.map(TensorBinding::into_tensor_arg).into(),
                    grads.x.into_tensor_arg(),
                    (sums.clone().map(TensorBinding::into_buffer_arg)).into(),
                    p.epsilon.unwrap_or_default(),
                    blueprint,
                    elem_type(p.element),
                    elem_type(p.gamma),
                );
            }
        }
        if let (Some(sums), Some(gamma)) = (sums, grads.gamma)
            && width > 0
        {
            let blueprint = SumsBlueprint::choose(self.client);
            // SAFETY: the buffers hold `cubes` rows, none of which is read if there are none, and one row.
            unsafe {
                gamma_gradient_kernel::launch_unchecked(
                    self.client,
                    CubeCount::Static(width.div_ceil(blueprint.columns) as u32, 1, 1),
                    blueprint.cube_dim(),
                    address_type(&[&sums], 4),
                    sums.into_buffer_arg(),
                    gamma.into_buffer_arg(),
                    cubes,
                    width,
                    blueprint,
                    elem_type(p.gamma),
                );
            }
        }
    }

    fn cubes(&self, most: usize, blueprint: NormBlueprint) -> usize {
        self.problem
            .row_count()
            .div_ceil(blueprint.rows())
            .min(most)
    }

    fn angles<T: Size>(&self) -> ComptimeOptionArgs<Angles<T>> {
        let start = self.problem.rotary.map_or(0, |rotary| rotary.start);
        let table = self.parameters.table.clone();
        table
            .map(|table| AnglesLaunch::new(table.into_tensor_arg(), start))
            .into()
    }

    /// The elements of the table that are read at once: 2 (cosine and sine) or 1.
    fn table_vector(&self) -> usize {
        let together = |table: &TensorBinding| {
            let mut outer = table.strides[..2].iter();
            begins_at(table, 2 * size_of::<f32>()) && outer.all(|s| s % 2 == 0)
        };
        match &self.parameters.table {
            Some(table) if together(table) => 2,
            _ => 1,
        }
    }
}

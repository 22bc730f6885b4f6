//! Host side of the tensor-core forward pass.

use crate::alibi::slopes;
use crate::args::{Outputs, scaling_and_dropout};
use crate::forward::mma::forward_mma_kernel;
use crate::forward::wgmma::forward_wgmma_kernel;
use crate::host::check::{address_type, elem_type};
use crate::host::engine::Instruction;
use crate::host::scratch::{bytes, scratch};
use crate::matrix::args::{LaunchedTilesLaunch, OperandsLaunch, OutputsLaunch};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::rows::RowOrder;
use crate::matrix::wgmma::key_boxes::KeyMapsLaunch;
use crate::pattern::intervals::slices::slice_bytes;
use crate::pattern::tensors::TileLaunch;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The forward pass of a checked, non-empty problem whose rows begin at multiples of 16 bytes.
pub(crate) struct MatrixForward<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub rows: [&'a TensorBinding; 3],
    pub blueprint: MmaBlueprint,
    /// Number of parts of the keys of every query tile.
    pub parts: usize,
}

/// The shapes of the outputs and of the LSE of the given number of parts of the keys.
fn part_shapes(problem: &Problem, parts: usize) -> ([usize; 5], [usize; 4]) {
    let [batch, heads, len, dim] = problem.q_shape();
    ([parts, batch, heads, len, dim], [parts, batch, heads, len])
}

/// Bytes of the buffers that [`outputs_of_parts`] and slices hold at once, without the lists of live keys.
pub(crate) fn workspace(problem: &Problem, blueprint: MmaBlueprint, parts: usize) -> usize {
    let (out, lse) = part_shapes(problem, parts);
    let of_parts = match blueprint.split {
        true => bytes(out) + 2 * bytes(lse),
        false => 0,
    };
    of_parts + slice_bytes(problem, blueprint.queries())
}

/// The outputs of the launches of a pass whose keys are split, which [`merge`](super::merge::merge) reads: f32, without a
/// residual, with the parts as a first axis.
///
/// They take `4 * parts * (head_dim + 2)` bytes of the client's pool per row of the output. With the number of parts that
/// [`MmaBlueprint::split`] chooses, these are at most the rows of the tiles that the device holds at once: 35 MB on 132
/// multiprocessors.
pub(crate) fn outputs_of_parts(client: &Client, problem: &Problem, parts: usize) -> Outputs {
    let (out_shape, lse_shape) = part_shapes(problem, parts);
    let [lse, rest] = [(); 2].map(|()| scratch(client, lse_shape));
    Outputs {
        lse_rest: Some(rest),
        ..Outputs::new(scratch(client, out_shape), lse)
    }
}

impl MatrixForward<'_> {
    /// One launch over some query tiles. `outputs` are [of parts](outputs_of_parts) if the keys are split.
    pub(crate) fn launch(&self, tiles: TileLaunch, outputs: &Outputs) {
        let (client, problem) = (self.client, self.problem);
        let Outputs {
            out,
            residual,
            lse,
            lse_rest,
        } = outputs.clone();
        let order = RowOrder::of(&out);
        let blueprint = (self.blueprint).writing([&out].into_iter().chain(&residual));
        let output = match blueprint.split {
            true => f32::elem_type_native(),
            false => elem_type(problem.element),
        };
        let head_groups = (problem.batch * problem.q_heads / blueprint.heads) as u32;
        let words: Vec<_> = tiles.source.all().chain([&lse]).chain(&lse_rest).collect();
        let address = address_type(&self.rows, problem.element.size())
            .max(address_type(&words, 4))
            .max(address_type(&[&out], output.size()));
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
            ($kernel:ident $(, $maps:expr)?) => {
                // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and the
                // lists hold keys below `k_len`.
                unsafe {
                    $kernel::launch_unchecked(
                        client,
                        CubeCount::Static(tiles.count as u32, head_groups, self.parts as u32),
                        blueprint.cube_dim(),
                        address,
                        OperandsLaunch::of(self.rows),
                        tiles.source.into_query_tiles(slopes(client, problem)),
                        OutputsLaunch::new(
                            out.into_buffer_arg(),
                            residual.map(TensorBinding::into_buffer_arg).into(),
                            lse.into_buffer_arg(),
                            lse_rest.map(TensorBinding::into_buffer_arg).into(),
                            order,
                        ),
                        scaling_and_dropout(problem),
                        $($maps,)?
                        LaunchedTilesLaunch::new(tiles.first as u32, tiles.count as u32),
                        blueprint,
                        elem_type(problem.element),
                        output,
                    )
                }
            };
        }
        match blueprint.instruction {
            Instruction::Mma => launch!(forward_mma_kernel),
            Instruction::Wgmma => {
                let maps = KeyMapsLaunch::of(&blueprint, self.rows);
                launch!(forward_wgmma_kernel, maps)
            }
        }
    }
}

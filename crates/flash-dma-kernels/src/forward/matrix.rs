//! Host side of the tensor-core forward pass.

use crate::alibi::slopes;
use crate::args::{Inputs, Outputs, scaling_and_dropout};
use crate::forward::merge::{PartOutputs, merge};
use crate::forward::mma::forward_mma_kernel;
use crate::forward::wgmma::forward_wgmma_kernel;
use crate::host::check::{address_type, elem_type};
use crate::host::engine::Instruction;
use crate::host::scratch::{bytes, scratch};
use crate::matrix::args::{LaunchedTilesLaunch, OperandsLaunch, OutputsLaunch, TileLaunch};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::query_tile::RowOrder;
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::slices::{for_each_slice, slice_bytes};
use crate::pattern::intervals::tiles::QueryTiles;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Launches the forward pass of a checked, non-empty problem whose inputs satisfy
/// [`Inputs::rows_are_segments`]: one launch without scores, two per slice of query tiles with them, and one more
/// to merge if the blueprint is split into `parts`.
/// `live` lists the live keys if there are scores; `tiles` are of the blueprint's size.
///
/// Splitting takes `4 * parts * (head_dim + 2)` bytes of the client's pool per row of the output. As
/// [`MmaBlueprint::split`] counts the parts, that is at most the rows of the tiles that the device holds at once: 35 MB
/// on 132 multiprocessors.
pub(crate) fn launch(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    live: Option<&LiveKeys>,
    tiles: &QueryTiles,
    outputs: &Outputs,
    blueprint: MmaBlueprint,
    parts: usize,
) {
    let blueprint = MmaBlueprint {
        residual: outputs.residual.is_some(),
        rest: outputs.lse_rest.is_some() || blueprint.split,
        ..blueprint
    };
    let run = |outputs: &Outputs| {
        launch_parts(
            client, problem, inputs, live, tiles, outputs, blueprint, parts,
        );
    };
    if blueprint.split {
        let (out_shape, lse_shape) = part_shapes(problem, parts);
        let part_out = scratch(client, out_shape);
        let part_lse = scratch(client, lse_shape);
        let part_rest = scratch(client, lse_shape);
        run(&Outputs {
            lse_rest: Some(part_rest.clone()),
            ..Outputs::new(part_out.clone(), part_lse.clone())
        });
        let parts_of = PartOutputs {
            count: parts,
            out: part_out,
            lse: part_lse,
            lse_rest: part_rest,
        };
        merge(client, problem, parts_of, outputs);
    } else {
        run(outputs);
    }
}

/// The shapes of the outputs and of the LSE of the given number of parts of the keys.
fn part_shapes(problem: &Problem, parts: usize) -> ([usize; 5], [usize; 4]) {
    let [batch, heads, len, dim] = problem.q_shape();
    ([parts, batch, heads, len, dim], [parts, batch, heads, len])
}

/// The bytes of the buffers that [`launch`] holds at once, beside the lists of live keys.
pub(crate) fn workspace(problem: &Problem, blueprint: MmaBlueprint, parts: usize) -> usize {
    let (out, lse) = part_shapes(problem, parts);
    let of_parts = if blueprint.split {
        bytes(out) + 2 * bytes(lse)
    } else {
        0
    };
    of_parts + slice_bytes(problem, blueprint.queries())
}

/// The part of [`launch`] before merging: if the blueprint is split, the outputs are f32 without a residual and have
/// the parts as a first axis.
fn launch_parts(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    live: Option<&LiveKeys>,
    tiles: &QueryTiles,
    outputs: &Outputs,
    blueprint: MmaBlueprint,
    parts: usize,
) {
    let results = outputs.all();
    for_each_slice(client, problem, inputs, live, tiles, &results, |slice| {
        let Inputs { q, k, v, .. } = inputs.clone();
        launch_slice(
            client,
            problem,
            [q, k, v],
            slice.into(),
            outputs,
            blueprint,
            parts,
        );
    });
}

/// One launch of the kernel of a blueprint over some query tiles.
pub(crate) fn launch_slice(
    client: &Client,
    problem: &Problem,
    [q, k, v]: [TensorBinding; 3],
    tiles: TileLaunch,
    outputs: &Outputs,
    blueprint: MmaBlueprint,
    parts: usize,
) {
    let Outputs {
        out,
        residual,
        lse,
        lse_rest,
    } = outputs.clone();
    let order = RowOrder::of(&out);
    let blueprint = blueprint.writing([&out].into_iter().chain(&residual));
    let output = if blueprint.split {
        f32::elem_type_native()
    } else {
        elem_type(problem.element)
    };
    let head_groups = (problem.batch * problem.q_heads / blueprint.heads) as u32;
    let words: Vec<_> = tiles.source.all().chain([&lse]).chain(&lse_rest).collect();
    let address = address_type(&[&q, &k, &v], problem.element.size())
        .max(address_type(&words, 4))
        .max(address_type(&[&out], output.size()));
    // One argument list, because both kernels take the same arguments.
    macro_rules! launch {
    ($kernel:ident, $blueprint:expr) => {
        // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and
        // the lists hold keys below `k_len`.
        unsafe {
            $kernel::launch_unchecked(
                    client,
                    CubeCount::Static(tiles.count as u32, head_groups, parts as u32),
                    blueprint.cube_dim(),
                    address,
                    OperandsLaunch::new(
                        q.into_tensor_arg(),
                        k.into_tensor_arg(),
                        v.into_tensor_arg(),
                    ),
                    tiles.source.into_query_tiles(slopes(client, problem)),
                    OutputsLaunch::new(
                        out.into_buffer_arg(),
                        residual.map(TensorBinding::into_buffer_arg).into(),
                        lse.into_buffer_arg(),
                        lse_rest.map(TensorBinding::into_buffer_arg).into(),
                        order,
                    ),
                    scaling_and_dropout(problem),
                    LaunchedTilesLaunch::new(tiles.first as u32, tiles.count as u32),
                    $blueprint,
                    elem_type(problem.element),
                    output,
            )
        }
    };
}
    match blueprint.instruction {
        Instruction::Mma => launch!(forward_mma_kernel, blueprint),
        Instruction::Wgmma => launch!(forward_wgmma_kernel, blueprint),
    }
}

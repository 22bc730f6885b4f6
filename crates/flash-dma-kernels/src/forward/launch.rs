//! Host side of the forward pass.

use super::kernel::forward_kernel;
use crate::Inputs;
use crate::lists::{QueryTiles, live_keys};
use crate::tile::{
    Blueprint, Layout, Pass, address_type, check_device, check_tensor, elem_type, fill,
    for_each_slice, vector_size,
};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, Problem, TensorName};

/// Buffers of [`forward_kernel`].
const BINDINGS: u32 = 9;

/// Attention of every query over its selected keys: writes `out` (`[batch, q_heads, q_len, head_dim]`,
/// the problem's element type) and `lse` (`[batch, q_heads, q_len]`, f32, natural logarithm), both
/// contiguous and overwritten. A query that selects nothing gets zeros and −∞.
///
/// Runs asynchronously on the client's stream. Memory beside the arguments is O(N): lists of the keys
/// of each query tile, in slices of bounded size.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, `selection` is not given exactly if the
/// problem has scores, or the device lacks what the kernel needs. Nothing is launched then.
pub fn forward(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let blueprint = Blueprint::choose(Pass::Forward, problem, &client.properties().hardware)?;
    forward_with(client, problem, inputs, out, lse, blueprint)
}

/// [`forward`] with a given blueprint.
pub(crate) fn forward_with(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
    blueprint: Blueprint,
) -> Result<(), AttentionError> {
    let size = problem.element.size();
    inputs.check(problem)?;
    check_tensor(
        TensorName::Out,
        &out,
        &problem.q_shape(),
        size,
        Layout::Contiguous,
    )?;
    check_tensor(
        TensorName::Lse,
        &lse,
        &problem.lse_shape(),
        4,
        Layout::Contiguous,
    )?;
    let tiles = QueryTiles::new(problem, blueprint.outer_rows());
    let cubes = [tiles.count, problem.q_heads, problem.batch];
    check_device(client, problem, BINDINGS, cubes)?;
    if problem.batch * problem.q_len == 0 {
        return Ok(());
    }
    if problem.k_len == 0 {
        fill(client, &out, 0.0, elem_type(problem.element));
        fill(client, &lse, f32::NEG_INFINITY, f32::elem_type_native());
        return Ok(());
    }

    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    for_each_slice(client, problem, &inputs, live.as_ref(), &tiles, |slice| {
        let Inputs { q, k, v, .. } = inputs.clone();
        let [scores, intervals, list, counts] = slice.selection;
        let typed = [&q, &k, &v, &out];
        let words = [&scores, &intervals, &list, &counts, &lse];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            forward_kernel::launch_unchecked(
                client,
                CubeCount::Static(slice.tiles as u32, cubes[1] as u32, cubes[2] as u32),
                blueprint.cube_dim(),
                address_type(&typed, size).max(address_type(&words, 4)),
                vector_size(&typed, size),
                q.into_tensor_arg(),
                k.into_tensor_arg(),
                v.into_tensor_arg(),
                scores.into_tensor_arg(),
                intervals.into_tensor_arg(),
                list.into_tensor_arg(),
                counts.into_tensor_arg(),
                out.clone().into_tensor_arg(),
                lse.clone().into_tensor_arg(),
                problem.scale,
                problem.softcap.unwrap_or(1.0),
                slice.first_tile,
                blueprint,
                elem_type(problem.element),
            );
        }
    });
    Ok(())
}

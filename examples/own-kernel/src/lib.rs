//! A custom kernel on the tiles of `flash-dma-kernels`: the attention mass that every key receives, the sum of its
//! probabilities over all queries that attend to it. The book's chapter "Write a kernel on our tiles" walks through
//! it. This file is the host's side, `kernel` the device's.

mod kernel;

use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_kernels::internals::tiles::{Blueprint, Kernel};
use flash_dma_kernels::internals::{Layout, check_tensor, elem_type, vector_size};
use flash_dma_kernels::{AttentionError, Forward, Inputs, Outputs, Problem, Selection, select};
use flash_dma_problem::{TensorName, check_grid};
use flash_dma_reference::{self as reference, Exact};
use raw_kernels::{Kind, empty};

/// Uploads the inputs of a problem with scores, selects and attends. The kernel reads only the LSE of the results.
pub fn forward_pass(
    client: &Client,
    host: &reference::Inputs,
) -> Result<(Inputs, TensorBinding), AttentionError> {
    let (p, inputs) = (host.problem, raw_kernels::inputs(client, host));
    let selection = inputs.selection.clone().expect("there are scores");
    select(client, selection.scores, p.window, selection.intervals)?;
    let out = empty(client, &p.q_shape(), Kind::Element(p.element));
    let lse = empty(client, &p.lse_shape(), Kind::F32);
    p.plan_forward(client, &inputs, None)?
        .run(Outputs::new(out, lse.clone()))?;
    Ok((inputs, lse))
}

// ANCHOR: launch
/// Blueprint of a problem, if a cube fits the device. The forward kernel's shared memory is large enough: it has one
/// tile and the weights more.
pub fn blueprint(client: &Client, problem: &Problem) -> Result<Blueprint, AttentionError> {
    Blueprint::choose(Kernel::Forward, problem, &client.properties().hardware)
}

/// Overwrites `mass`, contiguous `[batch, kv_heads, k_len]`, with the sum of each key's probabilities over all
/// queries of the group's heads. A key that nothing attends to gets exactly 0. `lse` is the output of the forward
/// pass. Tensors that do not fit are refused before anything is launched, by an error that calls `mass` the output.
pub fn attention_mass(
    client: &Client,
    p: &Problem,
    inputs: &Inputs,
    lse: &TensorBinding,
    mass: &TensorBinding,
    blueprint: Blueprint,
) -> Result<(), AttentionError> {
    let Selection {
        scores, intervals, ..
    } = check(p, inputs, lse, mass)?;
    let tiles = p.k_len.div_ceil(blueprint.outer_rows());
    let limits: [u32; 3] = client.properties().hardware.max_cube_count.into();
    check_grid([tiles, p.kv_heads, p.batch], limits.map(|n| n as usize))?;
    if p.batch * p.k_len == 0 {
        return Ok(());
    }
    let (q, k, size) = (&inputs.q, &inputs.k, p.element.size());
    let tensors = [q, k, lse, scores, intervals, mass];
    // In the smallest elements; wider ones are fewer.
    let address = tensors.map(|tensor| tensor.required_address_type(size));
    let args = tensors.map(|tensor| tensor.clone().into_tensor_arg());
    let [q_arg, k_arg, lse, scores, intervals, mass] = args;
    let (scale, softcap) = (p.scale, p.softcap.unwrap_or(1.0));
    // SAFETY: every tensor was checked to hold the shape and strides that the kernel indexes by, rows and positions
    // past the last are neither read nor written, and the grid has one cube for each tile of keys.
    unsafe {
        kernel::mass_kernel::launch_unchecked(
            client,
            CubeCount::Static(tiles as u32, p.kv_heads as u32, p.batch as u32),
            blueprint.cube_dim(),
            address.into_iter().max().unwrap_or_default(),
            vector_size(&[q, k], size),
            kernel::ArgsLaunch::new(q_arg, k_arg, lse, scores, intervals, scale, softcap),
            mass,
            blueprint,
            elem_type(p.element),
        );
    }
    Ok(())
}
// ANCHOR_END: launch

// ANCHOR: check
/// Checks every tensor against the problem.
fn check<'a>(
    p: &Problem,
    inputs: &'a Inputs,
    lse: &TensorBinding,
    mass: &TensorBinding,
) -> Result<&'a Selection, AttentionError> {
    let what = "a mass without scores".into();
    let selection = inputs.selection.as_ref().filter(|_| p.has_scores);
    let selection = selection.ok_or(AttentionError::Unsupported { what })?;
    let rows = |name, tensor, shape: [usize; 4]| {
        check_tensor(name, tensor, &shape, p.element.size(), Layout::Strided)
    };
    rows(TensorName::Query, &inputs.q, p.q_shape())?;
    rows(TensorName::Key, &inputs.k, p.kv_shape())?;
    let (scores, shape, words) = (&selection.scores, p.scores_shape(), Layout::Contiguous);
    check_tensor(TensorName::Scores, scores, &shape, 4, words)?;
    let (intervals, pairs) = (&selection.intervals, p.intervals_shape());
    check_tensor(TensorName::Intervals, intervals, &pairs, 4, words)?;
    check_tensor(TensorName::Lse, lse, &p.lse_shape(), 4, words)?;
    check_tensor(TensorName::Out, mass, &shape, 4, words)?;
    Ok(selection)
}
// ANCHOR_END: check

// ANCHOR: gradient
/// The attention mass in f64: `out` is the sum of the attended rows of `v` weighted by their probabilities, so if its
/// gradient is 1 everywhere, every element of the gradient of a row of `v` is the row's mass.
pub fn exact_mass(inputs: &reference::Inputs) -> Exact {
    let Exact { values, magnitude } = inputs.backward(&vec![1.0; inputs.q.len()], None).v;
    let first = |rows: Vec<f64>| rows.into_iter().step_by(inputs.problem.head_dim).collect();
    let [values, magnitude] = [values, magnitude].map(first);
    Exact { values, magnitude }
}
// ANCHOR_END: gradient

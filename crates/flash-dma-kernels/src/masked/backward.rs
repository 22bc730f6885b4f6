//! Host side of the backward pass.

use super::args::{MaskedGradients, MaskedInputs};
use super::bias::bias_kernel;
use super::dkdv::dkdv_kernel;
use super::dq::dq_kernel;
use super::launch::Words;
use crate::Saved;
use crate::backward::launch_delta;
use crate::tile::{Blueprint, Pass, address_type, check_device, elem_type, fill, vector_size};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem};

/// Buffers of [`dkdv_kernel`], the kernel with the most.
const BINDINGS: u32 = 11;

/// The gradients of [`masked_forward`](crate::masked_forward), contiguous and overwritten; exactly zero where no
/// pair contributes. That of the bias is summed in f32 over every axis it broadcasts, in a fixed order.
///
/// Runs asynchronously on the client's stream. Memory beside the arguments: one f32 a query row.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or the device lacks what the kernels need. Nothing is
/// launched then.
pub fn masked_backward(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    saved: Saved,
    grads: MaskedGradients,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    let hardware = &client.properties().hardware;
    let dq = Blueprint::choose(Pass::GradQuery, p, hardware)?;
    let dkdv = Blueprint::choose(Pass::GradKeyValue, p, hardware)?;
    inputs.check(problem)?;
    saved.check(p)?;
    grads.check(problem)?;
    let bias_cubes = problem.bias.map_or([1; 3], |bias| bias_cubes(bias, dkdv));
    let key_tiles = p.k_len.div_ceil(dkdv.outer_rows());
    let tiles = p.q_len.div_ceil(dq.outer_rows());
    let most = [
        tiles.max(key_tiles).max(bias_cubes[0]),
        p.q_heads.max(bias_cubes[1]),
        p.batch.max(bias_cubes[2]),
    ];
    check_device(client, p, BINDINGS, most)?;
    if p.batch * p.q_len * p.k_len == 0 {
        let element = elem_type(p.element);
        for grad in [&grads.q, &grads.k, &grads.v] {
            fill(client, grad, 0.0, element);
        }
        if let Some(bias) = &grads.bias {
            fill(client, bias, 0.0, f32::elem_type_native());
        }
        return Ok(());
    }
    let delta = launch_delta(client, p, &saved);
    let pass = MaskedPass {
        client,
        problem,
        inputs: &inputs,
        saved: &saved,
        delta: &delta,
    };
    pass.launch_dq(&grads, tiles, dq);
    pass.launch_dkdv(&grads, key_tiles, dkdv);
    if let Some(bias) = &grads.bias {
        pass.launch_bias(bias, bias_cubes, dkdv);
    }
    Ok(())
}

/// Cubes of [`bias_kernel`]: tiles of keys, tiles of queries, heads of all sequences.
fn bias_cubes([batch, heads, queries, keys]: [usize; 4], blueprint: Blueprint) -> [usize; 3] {
    [
        keys.div_ceil(blueprint.outer_rows()),
        queries.div_ceil(blueprint.inner_rows()),
        batch * heads,
    ]
}

/// What the kernels read.
struct MaskedPass<'a> {
    client: &'a Client,
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs,
    saved: &'a Saved,
    delta: &'a TensorBinding,
}

impl MaskedPass<'_> {
    fn launch_dq(&self, grads: &MaskedGradients, tiles: usize, blueprint: Blueprint) {
        let p = &self.problem.attention;
        let size = p.element.size();
        let Words { bits, counts, bias } = self.inputs.words();
        let MaskedInputs { q, k, v, .. } = self.inputs.clone();
        let typed = [&q, &k, &v, &self.saved.grad_out, &grads.q];
        let words = [&bits, &counts, &bias, self.delta];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            dq_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(tiles as u32, p.q_heads as u32, p.batch as u32),
                blueprint.cube_dim(),
                address_type(&typed, size).max(address_type(&words, 4)),
                vector_size(&typed, size),
                q.into_tensor_arg(),
                k.into_tensor_arg(),
                v.into_tensor_arg(),
                self.saved.grad_out.clone().into_tensor_arg(),
                self.saved.lse.clone().into_tensor_arg(),
                self.delta.clone().into_tensor_arg(),
                bits.into_tensor_arg(),
                counts.into_tensor_arg(),
                bias.into_tensor_arg(),
                grads.q.clone().into_tensor_arg(),
                p.scale,
                p.softcap.unwrap_or(1.0),
                self.problem.plan.is_some(),
                self.problem.bias.is_some(),
                blueprint,
                elem_type(p.element),
            );
        }
    }

    fn launch_dkdv(&self, grads: &MaskedGradients, key_tiles: usize, blueprint: Blueprint) {
        let p = &self.problem.attention;
        let size = p.element.size();
        let Words { bits, counts, bias } = self.inputs.words();
        let MaskedInputs { q, k, v, .. } = self.inputs.clone();
        let typed = [&q, &k, &v, &self.saved.grad_out, &grads.k, &grads.v];
        let words = [&bits, &counts, &bias, self.delta];
        // SAFETY: as for dq.
        unsafe {
            dkdv_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(key_tiles as u32, p.kv_heads as u32, p.batch as u32),
                blueprint.cube_dim(),
                address_type(&typed, size).max(address_type(&words, 4)),
                vector_size(&typed, size),
                q.into_tensor_arg(),
                k.into_tensor_arg(),
                v.into_tensor_arg(),
                self.saved.grad_out.clone().into_tensor_arg(),
                self.saved.lse.clone().into_tensor_arg(),
                self.delta.clone().into_tensor_arg(),
                bits.into_tensor_arg(),
                counts.into_tensor_arg(),
                bias.into_tensor_arg(),
                grads.k.clone().into_tensor_arg(),
                grads.v.clone().into_tensor_arg(),
                p.scale,
                p.softcap.unwrap_or(1.0),
                self.problem.plan.is_some(),
                self.problem.bias.is_some(),
                blueprint,
                elem_type(p.element),
            );
        }
    }

    fn launch_bias(&self, grad_bias: &TensorBinding, cubes: [usize; 3], blueprint: Blueprint) {
        let p = &self.problem.attention;
        let size = p.element.size();
        let Words { bits, counts, bias } = self.inputs.words();
        let MaskedInputs { q, k, v, .. } = self.inputs.clone();
        let typed = [&q, &k, &v, &self.saved.grad_out];
        let words = [&bits, &counts, &bias, self.delta, grad_bias];
        let [queries, keys] = [bias.shape[2], bias.shape[3]];
        // SAFETY: as for dq.
        unsafe {
            bias_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(cubes[0] as u32, cubes[1] as u32, cubes[2] as u32),
                blueprint.cube_dim(),
                address_type(&typed, size).max(address_type(&words, 4)),
                vector_size(&typed, size),
                q.into_tensor_arg(),
                k.into_tensor_arg(),
                v.into_tensor_arg(),
                self.saved.grad_out.clone().into_tensor_arg(),
                self.saved.lse.clone().into_tensor_arg(),
                self.delta.clone().into_tensor_arg(),
                bits.into_tensor_arg(),
                counts.into_tensor_arg(),
                bias.into_tensor_arg(),
                grad_bias.clone().into_tensor_arg(),
                p.scale,
                p.softcap.unwrap_or(1.0),
                self.problem.plan.is_some(),
                queries == 1,
                keys == 1,
                blueprint,
                elem_type(p.element),
            );
        }
    }
}

//! Host side of the forward pass.

use super::args::MaskedInputs;
use super::forward::forward_kernel;
use crate::tile::{
    Blueprint, Layout, Pass, address_type, check_device, check_tensor, elem_type, fill, vector_size,
};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, TensorName};

/// Buffers of [`forward_kernel`].
const BINDINGS: u32 = 8;

/// Attention of every query over the keys it sees: writes `out` (`[batch, q_heads, q_len, head_dim]`, the
/// problem's element type) and `lse` (`[batch, q_heads, q_len]`, f32, natural logarithm), both contiguous and
/// overwritten. A query that sees nothing gets zeros and −∞.
///
/// Runs asynchronously on the client's stream. Blocks of the plan that a query tile does not see are skipped.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or the device lacks what the kernel needs. Nothing is
/// launched then.
pub fn masked_forward(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    let size = p.element.size();
    let blueprint = Blueprint::choose(Pass::Forward, p, &client.properties().hardware)?;
    inputs.check(problem)?;
    check_tensor(
        TensorName::Out,
        &out,
        &p.q_shape(),
        size,
        Layout::Contiguous,
    )?;
    check_tensor(TensorName::Lse, &lse, &p.lse_shape(), 4, Layout::Contiguous)?;
    let tiles = p.q_len.div_ceil(blueprint.outer_rows());
    check_device(client, p, BINDINGS, [tiles, p.q_heads, p.batch])?;
    if p.batch * p.q_len == 0 {
        return Ok(());
    }
    if p.k_len == 0 {
        fill(client, &out, 0.0, elem_type(p.element));
        fill(client, &lse, f32::NEG_INFINITY, f32::elem_type_native());
        return Ok(());
    }
    let Words { bits, counts, bias } = inputs.words();
    let MaskedInputs { q, k, v, .. } = inputs;
    let typed = [&q, &k, &v, &out];
    let words = [&bits, &counts, &bias, &lse];
    // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(tiles as u32, p.q_heads as u32, p.batch as u32),
            blueprint.cube_dim(),
            address_type(&typed, size).max(address_type(&words, 4)),
            vector_size(&typed, size),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            bits.into_tensor_arg(),
            counts.into_tensor_arg(),
            bias.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            lse.clone().into_tensor_arg(),
            p.scale,
            p.softcap.unwrap_or(1.0),
            problem.plan.is_some(),
            problem.bias.is_some(),
            blueprint,
            elem_type(p.element),
        );
    }
    Ok(())
}

/// What the kernels read beside q, k and v. What the problem lacks is any buffer, never read.
pub(super) struct Words {
    pub bits: TensorBinding,
    pub counts: TensorBinding,
    pub bias: TensorBinding,
}

impl MaskedInputs {
    pub(super) fn words(&self) -> Words {
        let none = || self.q.clone();
        Words {
            bits: self
                .plan
                .as_ref()
                .map_or_else(none, |plan| plan.bits.clone()),
            counts: self
                .plan
                .as_ref()
                .map_or_else(none, |plan| plan.counts.clone()),
            bias: self.bias.clone().unwrap_or_else(none),
        }
    }
}

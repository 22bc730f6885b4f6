//! The scores of Dynamic Mask Attention for a few tokens, from their values, in one launch, as in a step over a cache.
//! Every token reads the whole projection again, so for many tokens use a matrix product.

mod kernel;

use crate::host::check::{
    Layout, address_type, begins_at, check_grid, check_tensor, check_type, elem_type, reads_in,
    widest_vector,
};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, ElementType, TensorName};
use kernel::{ZohBlueprint, zoh_scores_kernel};

/// Units of a cube, except where units are threads of a processor.
const UNITS: usize = 64;

/// The parameters from which scores are computed, all of one element type.
#[derive(Clone, Debug)]
pub struct ZohParameters {
    /// `[heads, heads * head_dim]`, contiguous.
    pub dt_proj: TensorBinding,
    /// `[heads]`, contiguous: the bias added before the softplus.
    pub bias: Option<TensorBinding>,
    /// `[heads]`, contiguous.
    pub a: TensorBinding,
    /// Their type.
    pub element: ElementType,
}

/// Writes `exp(a * softplus(values . dt_projᵀ + bias))` to `out`, `[batch, heads, len]`, f32 and contiguous. `values` is
/// `[batch, heads, len, head_dim]` of type `element`, any strides with a contiguous last axis; the values of a token's
/// heads are concatenated. Arithmetic is f32 in a fixed order, which does not depend on the number of tokens.
///
/// The call only enqueues: a failure on the device is reported when the result is read.
///
/// # Errors
///
/// [`AttentionError`] if the device lacks an element type, a shape, stride or buffer does not fit, or there are more
/// tokens than the device's grids have cubes; nothing is launched in that case.
pub fn zoh_scores(
    client: &Client,
    values: &TensorBinding,
    element: ElementType,
    parameters: &ZohParameters,
    out: &TensorBinding,
) -> Result<(), AttentionError> {
    let units = match client.properties().hardware.plane_size_max {
        0 | 1 => 1,
        _ => UNITS,
    };
    run(client, values, element, parameters, out, units)
}

fn run(
    client: &Client,
    values: &TensorBinding,
    element: ElementType,
    parameters: &ZohParameters,
    out: &TensorBinding,
    units: usize,
) -> Result<(), AttentionError> {
    let &[batch, heads, len, head_dim] = &values.shape[..] else {
        return Err(AttentionError::Rank {
            tensor: TensorName::Value,
            expected: 4,
            actual: values.shape.len(),
        });
    };
    check_type(client, element)?;
    check_type(client, parameters.element)?;
    let (size, of) = (element.size(), parameters.element.size());
    let (shape, contiguous) = ([batch, heads, len, head_dim], Layout::Contiguous);
    check_tensor(TensorName::Value, values, &shape, size, Layout::Strided)?;
    let ZohParameters {
        dt_proj, bias, a, ..
    } = parameters;
    let shape = [heads, heads * head_dim];
    check_tensor(TensorName::DtProjection, dt_proj, &shape, of, contiguous)?;
    if let Some(bias) = bias {
        check_tensor(TensorName::DtProjection, bias, &[heads], of, contiguous)?;
    }
    check_tensor(TensorName::Decay, a, &[heads], of, contiguous)?;
    check_tensor(TensorName::Scores, out, &[batch, heads, len], 4, contiguous)?;
    check_grid(client, 5, [batch * len, heads, 1])?;
    if batch * len * heads == 0 {
        return Ok(());
    }
    let widest = size.max(of);
    let vector = widest_vector(client, widest, |n| {
        reads_in(values, n, size) && begins_at(dt_proj, n * of)
    });
    let address = address_type(&[values], size)
        .max(address_type(&[dt_proj], of))
        .max(address_type(&[out], 4));
    let blueprint = ZohBlueprint {
        units,
        bias: bias.is_some(),
    };
    // SAFETY: every buffer was checked to hold the shape and the strides that the kernel indexes by, and its vectors to
    // begin at multiples of their size.
    unsafe {
        zoh_scores_kernel::launch_unchecked(
            client,
            CubeCount::Static((batch * len) as u32, heads as u32, 1),
            CubeDim::new_1d(units as u32),
            address,
            vector,
            values.clone().into_tensor_arg(),
            dt_proj.clone().into_buffer_arg(),
            (bias.clone().map(TensorBinding::into_buffer_arg)).into(),
            a.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            blueprint,
            elem_type(element),
            elem_type(parameters.element),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;

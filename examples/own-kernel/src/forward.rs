//! What stands before the kernel: a selection and a forward pass on the device.

use crate::launch::MassInputs;
use crate::tensors::{empty, upload};
use cubecl::client::Client;
use flash_dma_kernels::{AttentionError, ElementType, Inputs, Outputs, Selection, forward, select};
use flash_dma_reference as reference;

/// Uploads the inputs, selects and attends: the results are what the kernel reads besides q and k.
///
/// # Errors
///
/// What selection or forward pass refuse.
///
/// # Panics
///
/// If the problem has no scores.
pub fn forward_pass(
    client: &Client,
    host: &reference::Inputs,
) -> Result<MassInputs, AttentionError> {
    let (p, element) = (host.problem, host.problem.element);
    let scores = host.scores.as_ref().expect("the problem has scores");
    let scores = upload(client, scores, &p.scores_shape(), ElementType::F32);
    let intervals = empty(client, &p.intervals_shape(), 4);
    select(client, scores.clone(), p.window, intervals.clone())?;
    let inputs = Inputs {
        q: upload(client, &host.q, &p.q_shape(), element),
        k: upload(client, &host.k, &p.kv_shape(), element),
        v: upload(client, &host.v, &p.kv_shape(), element),
        selection: Some(Selection {
            scores: scores.clone(),
            intervals: intervals.clone(),
            far: None,
        }),
    };
    let out = empty(client, &p.q_shape(), element.size());
    let lse = empty(client, &p.lse_shape(), 4);
    forward::plan(client, &p, &inputs)?.run(Outputs::new(out, lse.clone()))?;
    let selection = inputs.selection.expect("it was given above");
    Ok(MassInputs {
        q: inputs.q,
        k: inputs.k,
        selection,
        lse,
    })
}

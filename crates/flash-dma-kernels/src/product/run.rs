//! From operands to launches.

use super::few_rows;
use super::operands::{Operands, Output, Sizes};
use super::parts;
use super::rule::{Choice, Route};
use super::standard;
use super::wgmma;
use crate::host::check::elem_type;
use crate::host::fill::fill;
use crate::host::range::range;
use crate::host::scratch::scratch;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, ElementType};

/// Writes `A B` to the contiguous `out`, `[m, n]` in `out_element`: sums in f32, rounded once, by the first of the
/// [choices](Choice::of) that serves. Sums over no terms are zeros.
///
/// # Errors
///
/// [`AttentionError`] if a shape, a stride or a buffer does not fit, or, by name, if the device cannot multiply in this
/// element type. Nothing is launched then.
pub fn product(
    client: &Client,
    operands: &Operands,
    out: &TensorBinding,
    out_element: ElementType,
) -> Result<(), AttentionError> {
    by_first(client, operands, Output::new(out, out_element), Choice::of)
}

/// [`product`] by one choice alone, for tests and measurements.
///
/// # Errors
///
/// The errors of [`product`], or [`AttentionError::Unsupported`] if the route refuses the product.
pub fn product_by(
    client: &Client,
    operands: &Operands,
    out: &TensorBinding,
    out_element: ElementType,
    choice: Choice,
) -> Result<(), AttentionError> {
    let out = Output::new(out, out_element);
    by_first(client, operands, out, |_, _| vec![choice])
}

/// Checks the tensors and multiplies by the first choice that serves.
fn by_first(
    client: &Client,
    operands: &Operands,
    out: Output,
    choices: impl Fn(&Client, &Operands) -> Vec<Choice>,
) -> Result<(), AttentionError> {
    operands.check(out)?;
    let Sizes { m, n, k } = operands.sizes();
    if k == 0 {
        fill(client, out.tensor, 0.0, elem_type(out.element));
    }
    if m * n * k == 0 {
        return Ok(());
    }
    let _range = range!("product");
    let operands = &operands.canonical();
    let mut refused = Vec::new();
    for choice in choices(client, operands) {
        match launch(client, operands, out, choice) {
            Ok(()) => return Ok(()),
            Err(reason) => refused.push(reason),
        }
    }
    let what = format!("this product: {}", refused.join("; "));
    Err(AttentionError::Unsupported { what })
}

/// Launches the kernels of a choice, or returns the reason for its refusal.
fn launch(client: &Client, operands: &Operands, out: Output, choice: Choice) -> Result<(), String> {
    let Sizes { m, n, .. } = operands.sizes();
    match choice.route {
        Route::FewRows => {
            few_rows::Plan::new(client, operands)?.launch(client, out);
        }
        Route::Wgmma(tile) => {
            let plan = wgmma::Plan::new(client, operands, tile, choice.parts)?;
            if plan.parts() == 1 {
                plan.launch(client, out);
            } else {
                let sums = scratch(client, [plan.parts(), m, n]);
                plan.launch(client, Output::new(&sums, ElementType::F32));
                parts::add(client, &sums, out);
            }
        }
        Route::Standard => standard::launch(client, operands, out, choice.parts)?,
    }
    Ok(())
}

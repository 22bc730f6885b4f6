//! From operands to launches.

use super::few_rows;
use super::library::LibraryProduct;
use super::operands::{Operands, Sizes};
use super::parts::{self, Division};
use super::rule::{Choice, Route};
use super::wgmma;
use crate::host::check::elem_type;
use crate::host::fill::fill;
use crate::host::range::range;
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
    by_first(client, operands, out, out_element, Choice::of)
}

/// [`product`] by one choice alone, for tests and measurements.
///
/// # Errors
///
/// Those of [`product`], or [`AttentionError::Unsupported`] if the route refuses the product.
pub fn product_by(
    client: &Client,
    operands: &Operands,
    out: &TensorBinding,
    out_element: ElementType,
    choice: Choice,
) -> Result<(), AttentionError> {
    by_first(client, operands, out, out_element, |_, _| vec![choice])
}

/// Checks the tensors and multiplies by the first choice that serves.
fn by_first(
    client: &Client,
    operands: &Operands,
    out: &TensorBinding,
    out_element: ElementType,
    choices: impl Fn(&Client, &Operands) -> Vec<Choice>,
) -> Result<(), AttentionError> {
    operands.check(out, out_element)?;
    let Sizes { m, n, k } = operands.sizes();
    if k == 0 {
        fill(client, out, 0.0, elem_type(out_element));
    }
    if m * n * k == 0 {
        return Ok(());
    }
    let _range = range!("product");
    let operands = &operands.canonical();
    let mut refused = Vec::new();
    for choice in choices(client, operands) {
        match launch(client, operands, out, out_element, choice) {
            Ok(()) => return Ok(()),
            Err(reason) => refused.push(reason),
        }
    }
    let what = format!("this product: {}", refused.join("; "));
    Err(AttentionError::Unsupported { what })
}

/// Launches the kernels of a choice, or returns why it refuses.
fn launch(
    client: &Client,
    operands: &Operands,
    out: &TensorBinding,
    out_element: ElementType,
    choice: Choice,
) -> Result<(), String> {
    let Sizes { m, n, k } = operands.sizes();
    let f32 = ElementType::F32;
    if choice.route == Route::FewRows {
        few_rows::Plan::new(client, operands)?.launch(client, out, out_element);
        return Ok(());
    }
    if let Route::Wgmma(tile) = choice.route {
        let plan = wgmma::Plan::new(client, operands, tile, choice.parts)?;
        if plan.parts() == 1 {
            plan.launch(client, out, out_element);
        } else {
            let sums = parts::buffer(client, plan.parts(), [m, n]);
            plan.launch(client, &sums, f32);
            parts::add(client, &sums, out, out_element);
        }
        return Ok(());
    }
    if let Route::Library(routine, _) = choice.route
        && routine.copies_boxes()
        && !operands.takes_boxes()
    {
        return Err("its copies need rows that begin at multiples of 16 bytes".into());
    }
    let by = |[a, b]: [TensorBinding; 2], out: TensorBinding, out_element| {
        let product = LibraryProduct {
            a,
            b,
            element: operands.element,
            out,
            out_element,
        };
        match choice.route {
            Route::Library(routine, tiling) => product.by(client, routine, tiling),
            Route::Standard | Route::Wgmma(_) | Route::FewRows => product.standard(client),
        }
    };
    let division = Division::new(k, choice.parts);
    if division.count() == 1 {
        let factors = [operands.a.clone(), operands.b.clone()];
        return by(factors, out.clone(), out_element);
    }
    let sums = parts::buffer(client, division.count(), [m, n]);
    let batch = match division.full {
        1 => rest_of_one(operands, &division),
        _ => parts::batch(operands, &division),
    };
    by(batch, parts::some_of(&sums, 0, division.full), f32)?;
    if division.rest > 0 {
        let factors = parts::rest(operands, &division);
        by(factors, parts::some_of(&sums, division.full, 1), f32)?;
    }
    parts::add(client, &sums, out, out_element);
    Ok(())
}

/// The one part of full length, as matrices.
fn rest_of_one(operands: &Operands, division: &Division) -> [TensorBinding; 2] {
    let first = Division {
        full: 0,
        rest: division.length,
        ..*division
    };
    parts::rest(operands, &first)
}

//! The passes of a check.

use super::data::{Data, Values, read};
use super::report::GradientError;
use crate::functions::attention::Attention;
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::{AttentionOptions, Problem, TensorName};

pub struct Gradients {
    pub q: Values,
    pub k: Values,
    pub v: Values,
    pub scores: Option<Values>,
}

/// Results of both passes.
pub struct Results {
    pub out: Values,
    /// Rounding error of `out`: the backward pass uses it, so the expected gradients of keys include it.
    pub residual: Option<Values>,
    pub lse: Values,
    /// Gradients of the pass with output gradients in every row.
    pub whole: Gradients,
    /// Gradients of the pass with output gradients in the sampled rows only.
    pub of_rows: Gradients,
}

fn options(p: &Problem) -> AttentionOptions {
    AttentionOptions {
        keep_window: p.has_scores.then_some(p.window),
        causal: p.causal,
        scale: Some(p.scale),
        softcap: p.softcap,
        alibi: p.alibi,
        deterministic: p.deterministic,
        dropout: p.dropout,
        engine: p.engine,
    }
}

impl Results {
    /// Runs the passes on a device with autodiff; the second has output gradients in the sampled `rows`.
    pub fn new(data: &Data, rows: &[usize], device: &Device) -> Result<Self, GradientError> {
        let (out, lse, whole) = passes(data, device, None)?;
        let (_, _, of_rows) = passes(data, device, Some(rows))?;
        Ok(Self {
            out,
            residual: residual(data, device)?,
            lse,
            whole,
            of_rows,
        })
    }
}

/// Rounding error of `out`, as the forward pass of autodiff keeps it.
fn residual(data: &Data, device: &Device) -> Result<Option<Values>, GradientError> {
    let device = &device.clone().inner();
    let [q, k, v] = data.rows(device);
    let attention = Attention::new(q, k, v).options(options(&data.problem));
    let residual = match data.scores(device) {
        Some(z) => attention.scores(z).try_residual(),
        None => attention.try_residual(),
    }?;
    residual
        .map(|residual| read(TensorName::Residual, residual))
        .transpose()
}

/// Output, LSE and gradients of a forward and a backward pass, with output gradients in all rows or in `only`.
fn passes(
    data: &Data,
    device: &Device,
    only: Option<&[usize]>,
) -> Result<(Values, Values, Gradients), GradientError> {
    let p = &data.problem;
    let [q, k, v] = data.rows(device).map(Tensor::require_grad);
    let scores = data.scores(device).map(Tensor::require_grad);
    let attention = Attention::new(q.clone(), k.clone(), v.clone()).options(options(p));
    let (out, lse) = match scores.clone() {
        Some(z) => attention.scores(z).try_forward_with_lse(),
        None => attention.try_forward_with_lse(),
    }?;
    // The sums may overflow the element type; their gradients do not.
    let weighted = (out.clone() * data.grad_out(device, only)).sum();
    let weighted = weighted.cast(DType::F32);
    let loss = weighted + (lse.clone() * data.grad_lse(device, only)).sum();
    let out = read(TensorName::Out, out)?;
    let lse = read(TensorName::Lse, lse)?;
    let mut grads = loss.backward();
    let of_inputs = Gradients {
        q: gradient(TensorName::GradQuery, q, &mut grads)?,
        k: gradient(TensorName::GradKey, k, &mut grads)?,
        v: gradient(TensorName::GradValue, v, &mut grads)?,
        scores: scores
            .map(|z| gradient(TensorName::GradScores, z, &mut grads))
            .transpose()?,
    };
    Ok((out, lse, of_inputs))
}

fn gradient<const D: usize>(
    tensor: TensorName,
    input: Tensor<D>,
    grads: &mut burn::tensor::Gradients,
) -> Result<Values, GradientError> {
    let gradient = input.grad_remove(grads);
    read(tensor, gradient.ok_or(GradientError::Missing { tensor })?)
}

//! The passes that a check looks at.

use super::data::{Data, Values, read};
use super::report::GradientError;
use crate::functions::attention::Attention;
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::{AttentionOptions, Problem, TensorName};

/// The gradients of the inputs.
pub struct Gradients {
    pub q: Values,
    pub k: Values,
    pub v: Values,
    pub scores: Option<Values>,
}

/// The results of both passes.
pub struct Results {
    pub out: Values,
    /// What the rounding of `out` lost: the backward pass uses it, so the gradients of keys are expected with it.
    pub residual: Option<Values>,
    pub lse: Values,
    /// With gradients of the outputs in every row.
    pub whole: Gradients,
    /// With gradients of the outputs in the sampled rows.
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

/// What the forward pass of autodiff keeps beside `out`.
pub fn residual(data: &Data, device: &Device) -> Result<Option<Values>, GradientError> {
    let device = &device.clone().inner();
    let attention = Attention::new(data.q(device), data.k(device), data.v(device));
    let attention = attention.options(options(&data.problem));
    let residual = match data.scores(device) {
        Some(z) => attention.scores(z).try_residual(),
        None => attention.try_residual(),
    }?;
    residual
        .map(|residual| read(TensorName::Residual, residual))
        .transpose()
}

/// Output, LSE and gradients of a forward and a backward pass, with gradients of the outputs in all rows or in `only`.
pub fn passes(
    data: &Data,
    device: &Device,
    only: Option<&[usize]>,
) -> Result<(Values, Values, Gradients), GradientError> {
    let p = &data.problem;
    let [q, k, v] = [data.q(device), data.k(device), data.v(device)].map(Tensor::require_grad);
    let scores = data.scores(device).map(Tensor::require_grad);
    let attention = Attention::new(q.clone(), k.clone(), v.clone()).options(options(p));
    let (out, lse) = match scores.clone() {
        Some(z) => attention.scores(z).try_forward_with_lse(),
        None => attention.try_forward_with_lse(),
    }?;
    // The sums may overflow the element type; their gradients do not.
    let weighted = (out.clone() * data.grad_out(device, only))
        .sum()
        .cast(DType::F32);
    let loss = weighted + (lse.clone() * data.grad_lse(device, only)).sum();
    let out = read(TensorName::Out, out)?;
    let lse = read(TensorName::Lse, lse)?;
    let mut grads = loss.backward();
    let mut grad = |tensor: TensorName, input: &Tensor<4>| {
        let grad = input.grad_remove(&mut grads);
        read(tensor, grad.ok_or(GradientError::Missing { tensor })?)
    };
    let q = grad(TensorName::GradQuery, &q)?;
    let k = grad(TensorName::GradKey, &k)?;
    let v = grad(TensorName::GradValue, &v)?;
    let tensor = TensorName::GradScores;
    let scores = match scores {
        None => None,
        Some(z) => {
            let grad = z.grad_remove(&mut grads);
            Some(read(
                tensor,
                grad.ok_or(GradientError::Missing { tensor })?,
            )?)
        }
    };
    Ok((out, lse, Gradients { q, k, v, scores }))
}

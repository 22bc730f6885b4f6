//! One case through the library's public functions, under autodiff.

use std::error::Error;

use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_flash_dma::{
    Attention, AttentionMask, Documents, Intervals, KeyRanges, MaskedAttention, Selector, TilePlan,
};

use crate::case::Case;

/// Results of a case, by name: floats in f32, which widens 16 bits exactly, and intervals in i32.
pub type Results = Vec<(&'static str, TensorData)>;

/// Runs a case: `out`, `lse`, `intervals` with scores, and the gradients of the inputs if the case has a gradient of
/// an output.
pub fn run(case: &Case, device: &Device, dtype: FloatDType) -> Result<Results, Box<dyn Error>> {
    if !device.supports_dtype(dtype) {
        return Err(format!("the device does not support {dtype:?}").into());
    }
    let device = &device.clone().autodiff();
    let rows = |name| -> Result<Tensor<4>, String> {
        let rows = case.tensor(name, device)?;
        let rows = rows.ok_or_else(|| format!("{name} is missing"))?;
        Ok(rows.cast(dtype).detach().require_grad())
    };
    let (q, k, v) = (rows("q")?, rows("k")?, rows("v")?);
    let scores = case.tensor("scores", device)?;
    let scores = scores.map(Tensor::<3>::require_grad);
    let bias = case.tensor("bias", device)?.map(Tensor::<4>::require_grad);
    let dout = case.tensor::<4>("dout", device)?;
    let dlse = case.tensor::<3>("dlse", device)?;
    let of_out @ [batch, heads, len, _] = q.dims();
    if let Some(dout) = &dout {
        same_shape("dout", "out", &of_out, &dout.dims())?;
    }
    if let Some(dlse) = &dlse {
        same_shape("dlse", "lse", &[batch, heads, len], &dlse.dims())?;
    }

    let operands = [q.clone(), k.clone(), v.clone()];
    let mut results = Vec::new();
    let (out, lse) = match &scores {
        Some(scores) => {
            let intervals = select(case, scores.clone(), device)?;
            let words = intervals.clone().into_tensor().try_into_data();
            results.push(("intervals", words?.convert::<i32>()));
            let [q, k, v] = operands;
            let call = Attention::new(q, k, v).options(case.options.attention());
            let call = call.scores(scores.clone()).intervals(&intervals);
            call.try_forward_with_lse()?
        }
        None => masked(case, operands, bias.clone(), device)?,
    };
    results.push(("out", read(out.clone())?));
    results.push(("lse", read(lse.clone())?));

    // A loss whose gradients for out and lse are the case's.
    let from_out = dout.map(|dout| (out.cast(FloatDType::F32) * dout).sum());
    let from_lse = dlse.map(|dlse| (lse * dlse).sum());
    let loss = match (from_out, from_lse) {
        (Some(a), Some(b)) => a + b,
        (Some(loss), None) | (None, Some(loss)) => loss,
        (None, None) => return Ok(results),
    };
    let gradients = loss.backward();
    let qkv = [("dq", q), ("dk", k), ("dv", v)].map(|(name, input)| (name, Some(input)));
    for (name, input) in qkv.into_iter().chain([("dbias", bias)]) {
        if let Some(gradient) = input.and_then(|input| input.grad(&gradients)) {
            results.push((name, read(gradient)?));
        }
    }
    if let Some(gradient) = scores.and_then(|scores| scores.grad(&gradients)) {
        results.push(("dscores", read(gradient)?));
    }
    Ok(results)
}

/// The best keys of the case's window, in their documents.
fn select(case: &Case, scores: Tensor<3>, device: &Device) -> Result<Intervals, Box<dyn Error>> {
    let mut selector = Selector::top(case.options.window.unwrap_or(usize::MAX));
    if let Some(ids) = case.documents(device)? {
        selector = selector.documents(Documents::from_ids(ids));
    }
    Ok(selector.try_select(scores)?)
}

/// Output and LSE of a case without scores.
fn masked(
    case: &Case,
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<4>>,
    device: &Device,
) -> Result<(Tensor<4>, Tensor<3>), Box<dyn Error>> {
    let options = case.options.attention();
    let (mask, documents) = (case.mask(device)?, case.documents(device)?);
    if mask.is_none() && documents.is_none() && bias.is_none() {
        let call = Attention::new(q, k, v).options(options);
        return Ok(call.try_forward_with_lse()?);
    }
    let lengths = [q.dims()[2], k.dims()[2]];
    let call = MaskedAttention::new(q, k, v).bias(bias).options(options);
    let outputs = match (mask, documents) {
        (None, None) => call.try_forward_with_lse(),
        (Some(mask), None) => call.mask(mask).try_forward_with_lse(),
        (Some(mask), Some(ids)) => {
            let mask = mask.and(AttentionMask::documents(ids));
            call.mask(mask).try_forward_with_lse()
        }
        // Documents without a mask need none: each query sees one range of keys.
        (None, Some(ids)) => {
            let ranges = KeyRanges::documents(ids);
            let plan = TilePlan::try_from_ranges(ranges, lengths, options.causal)?;
            call.plan(&plan).try_forward_with_lse()
        }
    };
    Ok(outputs?)
}

fn same_shape(name: &str, of: &str, expected: &[usize], actual: &[usize]) -> Result<(), String> {
    if expected == actual {
        return Ok(());
    }
    Err(format!(
        "{name} must have the shape of {of}, {expected:?}, but has {actual:?}"
    ))
}

fn read<const D: usize>(tensor: Tensor<D>) -> Result<TensorData, Box<dyn Error>> {
    let data = tensor.without_autodiff().try_into_data();
    Ok(data?.convert::<f32>())
}

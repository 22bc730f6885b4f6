//! `burn-flash-dma` through `Tensor`s and autodiff.

use super::{MaskedCall, MaskedEngine, MaskedGradients};
use crate::Outputs;
use crate::engines::burn::{Backend, Burn, download, tensor};
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_flash_dma::{AttentionMask, TilePlan, try_masked_attention_with_lse};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType};

fn upload(values: &[f64], shape: [usize; 4], element: ElementType, device: &Device) -> Tensor<4> {
    let values = values.iter().map(|&x| x as f32).collect();
    tensor(values, shape, element, device)
}

fn mask(call: &MaskedCall, device: &Device) -> Option<AttentionMask> {
    let mask = call.inputs.visible.as_ref()?;
    let values: Vec<bool> = mask
        .values
        .iter()
        .map(|&shown| shown != call.hidden)
        .collect();
    let data = TensorData::new(values, mask.shape);
    let tensor = Tensor::<4, Bool>::from_data(data, device);
    Some(if call.hidden {
        AttentionMask::hidden(tensor)
    } else {
        AttentionMask::visible(tensor)
    })
}

impl<B: Backend> MaskedEngine for Burn<B> {
    fn counts(&self, call: &MaskedCall) -> Vec<u32> {
        let p = &call.inputs.problem;
        let mask = mask(call, &self.device).expect("there is a mask");
        let plan = TilePlan::new(mask, [p.q_len, p.k_len], p.causal);
        let counts = plan.counts().clone().into_data_as::<i32>();
        counts.iter::<i32>().map(|n| n as u32).collect()
    }

    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), AttentionError> {
        let device = self.device.clone().autodiff();
        let (inputs, p) = (&call.inputs, &call.inputs.problem);
        let place = |values, shape| upload(values, shape, p.element, &device).require_grad();
        let q = place(&inputs.q, p.q_shape());
        let k = place(&inputs.k, p.kv_shape());
        let v = place(&inputs.v, p.kv_shape());
        let bias = inputs
            .bias
            .as_ref()
            .map(|bias| upload(&bias.values, bias.shape, ElementType::F32, &device).require_grad());
        let options = AttentionOptions {
            keep_window: None,
            causal: p.causal,
            scale: Some(p.scale),
            softcap: p.softcap,
            deterministic: p.deterministic,
        };
        let (out, lse) = try_masked_attention_with_lse(
            q.clone(),
            k.clone(),
            v.clone(),
            mask(call, &device),
            bias.clone(),
            options,
        )?;
        // The gradients of this loss are the given ones, exactly: the cast up loses nothing.
        let grad_out = upload(&call.grad_out, p.q_shape(), p.element, &device).cast(DType::F32);
        let mut loss = (out.clone().cast(DType::F32) * grad_out).sum();
        if let Some(grad_lse) = &call.grad_lse {
            let values = grad_lse.iter().map(|&x| x as f32).collect();
            let grad_lse = tensor(values, p.lse_shape(), ElementType::F32, &device);
            loss = loss + (lse.clone() * grad_lse).sum();
        }
        let grads = loss.backward();
        let grad = |x: &Tensor<4>| download(x.grad(&grads).expect("a tracked tensor"));
        Ok((
            Outputs {
                out: download(out.inner()),
                lse: download(lse.inner()),
            },
            MaskedGradients {
                q: grad(&q),
                k: grad(&k),
                v: grad(&v),
                bias: bias.as_ref().map(grad),
            },
        ))
    }
}

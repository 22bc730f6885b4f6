//! `burn-flash-dma` through `Tensor`s and autodiff.

use super::{NormCall, NormEngine, NormResults, Operation};
use crate::Refused;
use crate::engines::burn::{Backend, Burn, upload};
use crate::tensors::{floats, grad, load, values};
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::{AttentionError, HeadEncoding, try_rms_norm};

/// The table in the form of Burn's `RotaryEncoding`, `[positions, width, 2]`: every pair's angle twice.
fn table(call: &NormCall, device: &Device) -> Option<Tensor<3>> {
    let raw = call.table.as_ref()?;
    let [positions, pairs, _] = raw.shape[..] else {
        unreachable!("a table has three axes")
    };
    let mut angles = Vec::with_capacity(4 * positions * pairs);
    for position in 0..positions {
        for feature in 0..2 * pairs {
            let at = position * raw.strides[0] + feature / 2 * raw.strides[1];
            angles.extend([raw.values[at], raw.values[at + raw.strides[2]]]);
        }
    }
    Some(floats(&angles, [positions, 2 * pairs, 2], device))
}

fn run(
    call: &NormCall,
    x: Tensor<4>,
    gamma: Option<Tensor<1>>,
    device: &Device,
) -> Result<Tensor<4>, AttentionError> {
    let p = &call.problem;
    let norm = gamma.zip(p.epsilon);
    if call.operation == Operation::Rows {
        let (gamma, epsilon) = norm.expect("rows have a norm");
        return Ok(try_rms_norm(x, gamma, epsilon)?.swap_dims(1, 2));
    }
    let mut encoding = HeadEncoding::new(x);
    if let Some((gamma, epsilon)) = norm {
        encoding = encoding.norm(gamma, epsilon);
    }
    if let (Some(table), Some(rotary)) = (table(call, device), p.rotary) {
        encoding = encoding.rotary(table, rotary.start);
    }
    encoding.try_forward()
}

impl<B: Backend> NormEngine for Burn<B> {
    fn norm(&self, call: &NormCall) -> Result<NormResults, Refused> {
        let p = &call.problem;
        let device = self.device.clone().autodiff();
        let x = upload::<4>(&call.x, &device).require_grad();
        let gamma = call.gamma.as_ref();
        let gamma = gamma.map(|gamma| load(gamma, [p.width], p.gamma, &device).require_grad());
        let out = run(call, x.clone(), gamma.clone(), &device)?;
        // The gradients of this loss are the given ones, exactly: the upcast is lossless.
        let grad_out = upload::<4>(&call.grad_out, &device).cast(DType::F32);
        let grads = (out.clone().cast(DType::F32) * grad_out).sum().backward();
        Ok(NormResults {
            out: values(out.inner()),
            x: grad(&x, &grads),
            gamma: gamma.map(|gamma| grad(&gamma, &grads)),
        })
    }
}

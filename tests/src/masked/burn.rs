//! `burn-flash-dma` through `Tensor`s and autodiff.

use super::plans::{Keys, Plan, PlanEngine, Planned, RawMask, laid_out};
use super::{MaskedCall, MaskedEngine};
use crate::engines::burn::{Backend, Burn, loss, upload, upload_bool};
use crate::tensors::{grad, outputs, values};
use crate::{Gradients, Outputs, Passes, Refused};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_flash_dma::{AttentionMask, KeyRanges, MaskedAttention, TilePlan};
use flash_dma_problem::PlanGeometry;

struct Tensors {
    rows: [Tensor<4>; 3],
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
}

impl Tensors {
    fn new(call: &MaskedCall, device: &Device) -> Self {
        Self {
            rows: [&call.q, &call.k, &call.v].map(|raw| upload(raw, device)),
            mask: mask(call, device),
            bias: call.bias.as_ref().map(|bias| upload(bias, device)),
        }
    }

    fn tracked(self, call: &MaskedCall) -> Self {
        let learns = call.grad_bias.is_some();
        Self {
            rows: self.rows.map(Tensor::require_grad),
            mask: self.mask,
            bias: self.bias.map(|bias| bias.set_require_grad(learns)),
        }
    }

    fn attend(&self, call: &MaskedCall) -> Result<(Tensor<4>, Tensor<3>), Refused> {
        let [q, k, v] = self.rows.clone();
        let attention = MaskedAttention::new(q, k, v).mask(self.mask.clone());
        let attention = attention.bias(self.bias.clone()).options(call.options());
        Ok(attention.try_forward_with_lse()?)
    }
}

fn mask(call: &MaskedCall, device: &Device) -> Option<AttentionMask> {
    let tensor = upload_bool(call.mask.as_ref()?, device);
    Some(mask_of(tensor, call.hidden))
}

fn mask_of(tensor: Tensor<4, Bool>, hidden: bool) -> AttentionMask {
    match hidden {
        true => AttentionMask::hidden(tensor),
        false => AttentionMask::visible(tensor),
    }
}

impl<B: Backend> MaskedEngine for Burn<B> {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        let p = &call.problem.attention;
        let mask = mask(call, &self.device).expect("there is a mask");
        let plan = TilePlan::try_new(mask, [p.q_len, p.k_len], p.causal)?;
        let counts = plan.counts().clone().into_data_as::<i32>();
        Ok(counts.iter::<i32>().map(|n| n as u32).collect())
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        Ok(outputs(Tensors::new(call, &self.device).attend(call)?))
    }

    fn masked(&self, call: &MaskedCall) -> Passes {
        let device = self.device.clone().autodiff();
        let tensors = Tensors::new(call, &device).tracked(call);
        let results = tensors.attend(call)?;
        let grads = loss(&results, &call.grad_out, call.grad_lse.as_deref()).backward();
        let bias = tensors.bias.as_ref().filter(|_| call.grad_bias.is_some());
        let [q, k, v] = tensors.rows.each_ref().map(|x| grad(x, &grads));
        let gradients = Gradients {
            q,
            k,
            v,
            bias: bias.map(|bias| grad(bias, &grads)),
            ..Gradients::default()
        };
        Ok((outputs((results.0.inner(), results.1.inner())), gradients))
    }
}

impl<B: Backend> Burn<B> {
    /// The gradient of the bias when nothing else is tracked.
    ///
    /// # Panics
    ///
    /// If the engine refuses, or another tensor has a gradient.
    pub fn bias_alone(&self, call: &MaskedCall) -> Vec<f64> {
        let device = self.device.clone().autodiff();
        let mut tensors = Tensors::new(call, &device);
        tensors.bias = tensors.bias.map(Tensor::require_grad);
        let results = tensors.attend(call).expect("a good case");
        let grads = loss(&results, &call.grad_out, call.grad_lse.as_deref()).backward();
        for rows in &tensors.rows {
            assert!(rows.grad(&grads).is_none(), "a tensor that is not tracked");
        }
        grad(&tensors.bias.expect("there is a bias"), &grads)
    }

    /// The outputs of two calls with one plan of the mask.
    pub fn twice_with_plan(&self, call: &MaskedCall) -> [Vec<f64>; 2] {
        let p = &call.problem.attention;
        let Tensors { rows, mask, bias } = Tensors::new(call, &self.device);
        let plan = TilePlan::new(mask.expect("there is a mask"), [p.q_len, p.k_len], p.causal);
        [(); 2].map(|()| {
            let [q, k, v] = rows.clone();
            let attention = MaskedAttention::new(q, k, v).plan(&plan).bias(bias.clone());
            values(attention.options(call.options()).forward())
        })
    }
}

/// The content of a plan on Burn.
pub fn read(plan: &TilePlan) -> Plan {
    let words = |data: TensorData| data.iter::<i32>().map(|n| n as u32).collect();
    Plan {
        bits: words(plan.bits().clone().into_data()),
        counts: words(plan.counts().clone().into_data()),
    }
}

impl<B: Backend> PlanEngine for Burn<B> {
    fn plan(&self, geometry: &PlanGeometry, mask: &RawMask) -> Plan {
        let [b, h, q, k] = geometry.mask;
        let values = laid_out(geometry.mask, mask, |x| x != 0);
        let load =
            |shape| Tensor::<4, Bool>::from_data(TensorData::new(values, shape), &self.device);
        let tensor = match mask.transposed {
            true => load([b, h, k, q]).swap_dims(2, 3),
            false => load(geometry.mask),
        };
        let mask = mask_of(tensor, mask.hidden);
        let lengths = [geometry.q_len, geometry.k_len];
        read(&TilePlan::new(mask, lengths, geometry.causal))
    }

    fn plan_ranges(&self, geometry: &PlanGeometry, ranges: [&Keys; 2]) -> Planned {
        let [first, end] = ranges.map(|keys| {
            let data = TensorData::new(keys.values.clone(), keys.shape);
            Tensor::<3, Int>::from_data(data, &self.device)
        });
        let lengths = [geometry.q_len, geometry.k_len];
        let ranges = KeyRanges::new(first, end);
        TilePlan::try_from_ranges(ranges, lengths, geometry.causal).map(|plan| read(&plan))
    }
}

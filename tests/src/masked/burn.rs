//! `burn-flash-dma` through `Tensor`s and autodiff.

use super::plans::{Keys, Plan, PlanEngine, RawMask, laid_out};
use super::{MaskedCall, MaskedEngine, MaskedGradients};
use crate::engines::burn::{Backend, Burn, download, tensor, upload, upload_bool};
use crate::{Outputs, Refused};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::{AttentionMask, KeyRanges, MaskedAttention, TilePlan};
use flash_dma_problem::{AttentionError, ElementType, PlanGeometry};

/// The tensors of a call.
struct Tensors {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
}

impl Tensors {
    fn new(call: &MaskedCall, device: &Device) -> Self {
        Self {
            q: upload(&call.q, device),
            k: upload(&call.k, device),
            v: upload(&call.v, device),
            mask: mask(call, device),
            bias: call.bias.as_ref().map(|bias| upload(bias, device)),
        }
    }

    fn tracked(self, call: &MaskedCall) -> Self {
        Self {
            q: self.q.require_grad(),
            k: self.k.require_grad(),
            v: self.v.require_grad(),
            mask: self.mask,
            bias: self
                .bias
                .map(|bias| bias.set_require_grad(call.grad_bias.is_some())),
        }
    }

    fn attend(&self, call: &MaskedCall) -> Result<(Tensor<4>, Tensor<3>), Refused> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(Tensor::clone);
        MaskedAttention::new(q, k, v)
            .mask(self.mask.clone())
            .bias(self.bias.clone())
            .options(call.options())
            .try_forward_with_lse()
            .map_err(refused)
    }
}

fn mask(call: &MaskedCall, device: &Device) -> Option<AttentionMask> {
    let tensor = upload_bool(call.mask.as_ref()?, device);
    Some(if call.hidden {
        AttentionMask::hidden(tensor)
    } else {
        AttentionMask::visible(tensor)
    })
}

/// The gradients of this loss are the given ones, exactly: the upcast is lossless.
fn loss(out: &Tensor<4>, lse: &Tensor<3>, call: &MaskedCall, device: &Device) -> Tensor<1> {
    let grad_out = upload::<4>(&call.grad_out, device).cast(DType::F32);
    let loss = (out.clone().cast(DType::F32) * grad_out).sum();
    let Some(grad_lse) = &call.grad_lse else {
        return loss;
    };
    let values = grad_lse.iter().map(|&x| x as f32).collect();
    let shape = call.problem.attention.lse_shape();
    loss + (lse.clone() * tensor(values, shape, ElementType::F32, device)).sum()
}

/// Nothing can be written: results are new tensors.
fn refused(error: AttentionError) -> Refused {
    Refused {
        error,
        written: false,
    }
}

impl<B: Backend> MaskedEngine for Burn<B> {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        let p = &call.problem.attention;
        let mask = mask(call, &self.device).expect("there is a mask");
        let plan = TilePlan::try_new(mask, [p.q_len, p.k_len], p.causal).map_err(refused)?;
        let counts = plan.counts().clone().into_data_as::<i32>();
        Ok(counts.iter::<i32>().map(|n| n as u32).collect())
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        let (out, lse) = Tensors::new(call, &self.device).attend(call)?;
        Ok(Outputs {
            out: download(out),
            lse: download(lse),
        })
    }

    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), Refused> {
        let device = self.device.clone().autodiff();
        let tensors = Tensors::new(call, &device).tracked(call);
        let (out, lse) = tensors.attend(call)?;
        let grads = loss(&out, &lse, call, &device).backward();
        let grad = |x: &Tensor<4>| download(x.grad(&grads).expect("a tracked tensor"));
        Ok((
            Outputs {
                out: download(out.inner()),
                lse: download(lse.inner()),
            },
            MaskedGradients {
                q: grad(&tensors.q),
                k: grad(&tensors.k),
                v: grad(&tensors.v),
                bias: (tensors.bias.as_ref())
                    .filter(|_| call.grad_bias.is_some())
                    .map(grad),
            },
        ))
    }
}

impl<B: Backend> Burn<B> {
    /// The gradient of the bias where nothing else is tracked.
    ///
    /// # Panics
    ///
    /// If the engine refuses, or another tensor has a gradient.
    #[must_use]
    pub fn bias_alone(&self, call: &MaskedCall) -> Vec<f64> {
        let device = self.device.clone().autodiff();
        let mut tensors = Tensors::new(call, &device);
        tensors.bias = tensors.bias.map(Tensor::require_grad);
        let (out, lse) = tensors.attend(call).expect("a good case");
        let grads = loss(&out, &lse, call, &device).backward();
        for rows in [&tensors.q, &tensors.k, &tensors.v] {
            assert!(rows.grad(&grads).is_none(), "a tensor that is not tracked");
        }
        let bias = tensors.bias.expect("there is a bias");
        download(bias.grad(&grads).expect("it is tracked"))
    }

    /// The outputs of two calls with one plan of the mask.
    ///
    /// # Panics
    ///
    /// If the engine refuses.
    #[must_use]
    pub fn twice_with_plan(&self, call: &MaskedCall) -> [Vec<f64>; 2] {
        let p = &call.problem.attention;
        let Tensors {
            q,
            k,
            v,
            mask,
            bias,
        } = Tensors::new(call, &self.device);
        let plan = TilePlan::new(mask.expect("there is a mask"), [p.q_len, p.k_len], p.causal);
        [(); 2].map(|()| {
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let attention = MaskedAttention::new(q, k, v).plan(&plan).bias(bias.clone());
            download(attention.options(call.options()).forward())
        })
    }
}

/// The content of a plan on Burn.
#[must_use]
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
        let shape = if mask.transposed {
            [b, h, k, q]
        } else {
            geometry.mask
        };
        let tensor = Tensor::<4, Bool>::from_data(TensorData::new(values, shape), &self.device);
        let tensor = if mask.transposed {
            tensor.swap_dims(2, 3)
        } else {
            tensor
        };
        let mask = match mask.hidden {
            true => AttentionMask::hidden(tensor),
            false => AttentionMask::visible(tensor),
        };
        let lengths = [geometry.q_len, geometry.k_len];
        read(&TilePlan::new(mask, lengths, geometry.causal))
    }

    fn plan_ranges(
        &self,
        geometry: &PlanGeometry,
        first: &Keys,
        end: &Keys,
    ) -> Result<Plan, AttentionError> {
        let [first, end] = [first, end].map(|keys| {
            let data = TensorData::new(keys.values.clone(), keys.shape);
            Tensor::<3, Int>::from_data(data, &self.device)
        });
        let lengths = [geometry.q_len, geometry.k_len];
        let ranges = KeyRanges::new(first, end);
        Ok(read(&TilePlan::try_from_ranges(
            ranges,
            lengths,
            geometry.causal,
        )?))
    }
}

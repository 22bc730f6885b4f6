//! `flash-dma-kernels` through a CubeCL client, without Burn.

use super::{MaskedCall, MaskedEngine, MaskedGradients};
use crate::engines::kernels::{Kernels, Output, Target, bytes_of, contiguous};
use crate::{Layout, Outputs, Raw};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::{self as engine, MaskBits};
use flash_dma_problem::{AttentionError, ElementType};

impl<T: Target> Kernels<T> {
    fn plan(&self, call: &MaskedCall) -> Option<(MaskBits, Output)> {
        let mask = call.inputs.visible.as_ref()?;
        let geometry = call.problem().plan.expect("there is a mask");
        let bytes: Vec<u8> = (mask.values.iter())
            .map(|&shown| u8::from(shown != call.hidden))
            .collect();
        let handle = self.buffer(&bytes);
        let bits = self.output(&geometry.bits_shape(), ElementType::F32, 0);
        let counts = self.output(&geometry.counts_shape(), ElementType::F32, 0);
        let plan = MaskBits {
            bits: bits.binding(),
            counts: counts.binding(),
        };
        let mask = contiguous(&handle, &mask.shape);
        engine::plan(&self.client, &geometry, mask, 1, call.hidden, plan.clone())
            .expect("a good plan");
        Some((plan, counts))
    }

    fn place(&self, values: &[f64], shape: &[usize], element: ElementType) -> TensorBinding {
        // Rows that begin anywhere, and in another order than the heads'.
        let layout = match shape.len() {
            4 => Layout::Transposed,
            _ => Layout::Contiguous,
        };
        self.upload(&Raw::new(values, shape, element, layout))
    }
}

impl<T: Target> MaskedEngine for Kernels<T> {
    fn counts(&self, call: &MaskedCall) -> Vec<u32> {
        let (_, counts) = self.plan(call).expect("there is a mask");
        let bytes = self
            .client
            .read_one(counts.handle.clone())
            .expect("the launch failed");
        bytemuck::cast_slice(&bytes)[..counts.shape.iter().product()].to_vec()
    }

    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), AttentionError> {
        let (problem, inputs) = (call.problem(), &call.inputs);
        let p = &problem.attention;
        let bias = inputs.bias.as_ref();
        let arguments = engine::MaskedInputs {
            q: self.place(&inputs.q, &p.q_shape(), p.element),
            k: self.place(&inputs.k, &p.kv_shape(), p.element),
            v: self.place(&inputs.v, &p.kv_shape(), p.element),
            plan: self.plan(call).map(|(plan, _)| plan),
            bias: bias.map(|bias| self.place(&bias.values, &bias.shape, ElementType::F32)),
        };
        let out = self.output(&p.q_shape(), p.element, 0);
        let lse = self.output(&p.lse_shape(), ElementType::F32, 0);
        let (client, o, l) = (&self.client, out.binding(), lse.binding());
        match T::ENGINE {
            Some(engine::Engine::Portable) => {
                let portable = engine::Engine::Portable;
                engine::masked_forward_on(portable, client, &problem, arguments.clone(), o, l)?;
            }
            _ => engine::masked_forward(client, &problem, arguments.clone(), o, l)?,
        }
        let q = self.output(&p.q_shape(), p.element, 0);
        let [k, v] = [(); 2].map(|()| self.output(&p.kv_shape(), p.element, 0));
        let dbias = bias.map(|bias| self.output(&bias.shape, ElementType::F32, 0));
        let saved = engine::Saved {
            out: out.binding(),
            lse: lse.binding(),
            grad_out: self.place(&call.grad_out, &p.q_shape(), p.element),
            grad_lse: call.grad_lse.as_ref().map(|grad| {
                let handle = self.buffer(&bytes_of(grad, ElementType::F32));
                contiguous(&handle, &p.lse_shape())
            }),
        };
        let grads = engine::MaskedGradients {
            q: q.binding(),
            k: k.binding(),
            v: v.binding(),
            bias: dbias.as_ref().map(Output::binding),
        };
        engine::masked_backward(client, &problem, arguments, saved, grads)?;
        Ok((
            Outputs {
                out: self.read(&out),
                lse: self.read(&lse),
            },
            MaskedGradients {
                q: self.read(&q),
                k: self.read(&k),
                v: self.read(&v),
                bias: dbias.as_ref().map(|dbias| self.read(dbias)),
            },
        ))
    }
}

//! `flash-dma-kernels` through a CubeCL client, without Burn.

use super::{MaskedCall, MaskedEngine};
use crate::engines::Pass;
use crate::engines::buffers::{Output, binding};
use crate::engines::kernels::{Kernels, Ran, Target, planned, ran};
use crate::{Gradients, Outputs, Passes, Raw, Refused};
use flash_dma_kernels::{self as engine, MaskBits, Plan};
use flash_dma_kernels::{Backward, Forward};
use flash_dma_problem::{AttentionError, ElementType};

/// The size and the stride of each axis except that of the elements.
fn axes_of_rows<const N: usize>(all: [&Raw; N]) -> impl Iterator<Item = (usize, usize)> {
    let axes = all
        .into_iter()
        .flat_map(|raw| raw.shape.iter().zip(&raw.strides).take(3));
    axes.map(|(&len, &stride)| (len, stride))
}

/// True if the engine `mma` claims to support a call: elements of 16 bits, head dimensions that are multiples of 32,
/// rows that begin at multiples of 16 bytes, and a bias per key that is contiguous; for gradients, no other bias.
fn suits_mma(call: &MaskedCall, gradients: bool) -> bool {
    let p = &call.problem.attention;
    let mut axes = axes_of_rows([&call.q, &call.k, &call.v, &call.grad_out]);
    let bias = call.bias.as_ref().is_none_or(|bias| {
        let contiguous = bias.strides.last() == Some(&1);
        match call.problem.has_key_bias() {
            true => contiguous,
            false => !gradients,
        }
    });
    p.element != ElementType::F32
        && p.head_dim.is_multiple_of(32)
        && axes.all(|(len, stride)| len <= 1 || stride.is_multiple_of(8))
        && bias
}

/// True if the engine `wgmma` claims to support both passes of a call: those that `mma` supports at these head
/// dimensions, with rows that are not repeated, and with any bias per pair; for gradients with dropout or ALiBi, no
/// such bias.
fn suits_wgmma(call: &MaskedCall, gradients: bool) -> bool {
    let p = &call.problem.attention;
    let refused = gradients && (p.dropout.is_some() || p.alibi.is_some());
    let mut boxes = axes_of_rows([&call.q, &call.grad_out]);
    [64, 128].contains(&p.head_dim)
        && boxes.all(|(len, stride)| len <= 1 || stride > 0)
        && suits_mma(call, refused)
}

impl<T: Target> Kernels<T> {
    /// The plan of the call's mask, its buffers `missing` elements short.
    fn plan(
        &self,
        call: &MaskedCall,
        missing: usize,
    ) -> Result<Option<(MaskBits, Output)>, Refused> {
        let Some((bytes, mask)) = call.mask_bytes() else {
            return Ok(None);
        };
        let geometry = call.plan.expect("there is a mask");
        let bits = self.output(&geometry.bits_shape(), ElementType::F32, missing);
        let counts = self.output(&geometry.counts_shape(), ElementType::F32, missing);
        let plan = MaskBits {
            bits: bits.binding(),
            counts: counts.binding(),
        };
        let (buffer, size) = if self.stores_bytes() {
            (self.buffer(&bytes), 1)
        } else {
            let words: Vec<u32> = bytes.iter().map(|&x| x.into()).collect();
            (self.buffer(bytemuck::cast_slice(&words)), 4)
        };
        let mask = binding(&buffer, &mask.shape, &mask.strides);
        let (client, hidden) = (&self.client, call.hidden);
        let result = engine::plan(client, &geometry, mask, size, hidden, plan.clone());
        let untouched = || self.is_untouched(&[&bits, &counts]);
        result.map_err(|error| Refused::new(error, untouched()))?;
        Ok(Some((plan, counts)))
    }

    fn masked_inputs(&self, call: &MaskedCall) -> engine::MaskedInputs {
        let plan = self.plan(call, 0).expect("a good mask");
        engine::MaskedInputs {
            q: self.upload(&call.q),
            k: self.upload(&call.k),
            v: self.upload(&call.v),
            plan: plan.map(|(plan, _)| plan),
            bias: call.bias.as_ref().map(|bias| self.upload(bias)),
        }
    }

    /// True if the engine that this target forces must support a call: it claims to, and the device has the engine.
    fn must_serve(&self, call: &MaskedCall, gradients: bool) -> bool {
        let fingerprint = &self.client.properties().identity.fingerprint;
        let version = fingerprint.strip_prefix("ptx_sm").map(str::parse::<u32>);
        match (T::ENGINE, version) {
            (Some(engine::Engine::Wgmma), Some(Ok(version))) => {
                version == 90 && suits_wgmma(call, gradients)
            }
            (Some(engine::Engine::Mma), Some(Ok(version))) => {
                version >= 80 && suits_mma(call, gradients)
            }
            _ => false,
        }
    }

    /// Plans a pass on the engine that this target forces. Calls that it does not and need not support run on the
    /// engine that the kernels choose.
    fn on_engine<'a, O>(
        pass: Pass,
        must_serve: bool,
        plan: impl Fn(Option<engine::Engine>) -> Result<Plan<'a, O>, AttentionError>,
    ) -> Result<Plan<'a, O>, AttentionError> {
        let plan = match T::ENGINE.map(|engine| plan(Some(engine))) {
            Some(Err(AttentionError::Engine { .. })) if !must_serve => plan(None),
            Some(forced) => forced,
            None => plan(None),
        };
        ran(pass, planned(&plan));
        plan
    }

    fn run_masked(
        &self,
        call: &MaskedCall,
        inputs: engine::MaskedInputs,
        missing: usize,
        for_backward: bool,
    ) -> Result<Ran, Refused> {
        let problem = &call.problem;
        let ran = Ran::new(&problem.attention, for_backward, |shape, element| {
            self.output(shape, element, missing)
        });
        let must_serve = self.must_serve(call, false);
        let plan = Self::on_engine(Pass::MaskedForward, must_serve, |forced| {
            problem.plan_forward(&self.client, &inputs, forced)
        });
        self.run(plan, ran)
    }
}

impl<T: Target> MaskedEngine for Kernels<T> {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        let (_, counts) = self.plan(call, call.missing)?.expect("there is a mask");
        let bytes = self.read_bytes(&counts.binding(), 4);
        Ok(bytemuck::cast_slice(&bytes)[..counts.len()].to_vec())
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        let ran = self.run_masked(call, self.masked_inputs(call), call.missing, false)?;
        Ok(self.outputs(&ran))
    }

    fn masked(&self, call: &MaskedCall) -> Passes {
        let (problem, p) = (&call.problem, &call.problem.attention);
        let inputs = self.masked_inputs(call);
        let forwarded = self.run_masked(call, inputs.clone(), 0, true)?;
        let q = self.output(&p.q_shape(), p.element, call.missing);
        let [k, v] = [(); 2].map(|()| self.output(&p.kv_shape(), p.element, call.missing));
        let bias = call.grad_bias;
        let bias = bias.map(|shape| self.output(&shape, ElementType::F32, call.missing));
        let grad_lse = call.grad_lse.as_ref();
        let grad_lse = grad_lse.map(|g| self.tensor(g, &p.lse_shape(), ElementType::F32));
        let saved = forwarded.saved(self.upload(&call.grad_out), grad_lse);
        let grads = engine::MaskedGradients {
            q: q.binding(),
            k: k.binding(),
            v: v.binding(),
            bias: bias.as_ref().map(Output::binding),
        };
        let must_serve = self.must_serve(call, true);
        let plan = Self::on_engine(Pass::MaskedBackward, must_serve, |forced| {
            problem.plan_backward(&self.client, &inputs, &saved, forced)
        });
        plan.and_then(|plan| plan.run(grads)).map_err(|error| {
            let all: Vec<&Output> = [&q, &k, &v].into_iter().chain(&bias).collect();
            Refused::new(error, self.is_untouched(&all))
        })?;
        let grads = Gradients {
            q: self.read(&q),
            k: self.read(&k),
            v: self.read(&v),
            bias: bias.as_ref().map(|bias| self.read(bias)),
            ..Gradients::default()
        };
        Ok((self.outputs(&forwarded), grads))
    }
}

//! `flash-dma-cpu`.

use super::{MaskedCall, MaskedEngine};
use crate::engines::cpu::{Forwarded, unwritten, view};
use crate::engines::{Cpu, Host, is_untouched, narrow, of_element, widen};
use crate::{Gradients, Outputs, Passes, Raw, Refused};
use flash_dma_cpu::{self as engine, BroadcastView, Element};

fn broadcast<'a, T>(raw: &Raw, data: &'a [T]) -> BroadcastView<'a, T> {
    let view = view::<_, 4>(raw, data);
    BroadcastView {
        data,
        shape: view.shape,
        strides: view.strides,
    }
}

/// The bits and counts of the call's mask, with `missing` words too few.
fn plan(call: &MaskedCall, missing: usize) -> Result<Option<[Vec<u32>; 2]>, Refused> {
    let Some((bytes, mask)) = call.mask_bytes() else {
        return Ok(None);
    };
    let geometry = call.plan.expect("there is a mask");
    let words = |shape: &[usize]| vec![u32::MAX; shape.iter().product::<usize>() - missing];
    let mut bits = words(&geometry.bits_shape());
    let mut counts = words(&geometry.counts_shape());
    let view = broadcast(mask, &bytes);
    let result = engine::plan(&geometry, view, call.hidden, &mut bits, &mut counts);
    let untouched = || bits.iter().chain(&counts).all(|&n| n == u32::MAX);
    result.map_err(|error| Refused::new(error, untouched()))?;
    Ok(Some([bits, counts]))
}

struct Buffers<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    bits: Option<Vec<u32>>,
    bias: Option<Vec<f32>>,
}

impl<E: Host + Element> Buffers<E> {
    fn new(call: &MaskedCall) -> Self {
        let plan = plan(call, 0).expect("a good mask");
        Self {
            q: narrow(&call.q.values),
            k: narrow(&call.k.values),
            v: narrow(&call.v.values),
            bits: plan.map(|[bits, _]| bits),
            bias: call.bias.as_ref().map(|bias| narrow(&bias.values)),
        }
    }

    fn inputs<'a>(&'a self, call: &'a MaskedCall) -> engine::MaskedInputs<'a, E> {
        let bias = call.bias.as_ref().zip(self.bias.as_ref());
        engine::MaskedInputs {
            q: view(&call.q, &self.q),
            k: view(&call.k, &self.k),
            v: view(&call.v, &self.v),
            bits: self.bits.as_deref(),
            bias: bias.map(|(raw, data)| broadcast(raw, data)),
        }
    }

    /// The results; if requested, also those that a backward pass reads.
    fn forward(
        &self,
        call: &MaskedCall,
        missing: usize,
        for_backward: bool,
    ) -> Result<Forwarded<E>, Refused> {
        Forwarded::run(&call.problem.attention, missing, for_backward, |outputs| {
            engine::masked_forward(&call.problem, self.inputs(call), outputs)
        })
    }
}

fn forward<E: Host + Element>(call: &MaskedCall) -> Result<Outputs, Refused> {
    let forwarded = Buffers::<E>::new(call).forward(call, call.missing, false)?;
    Ok(forwarded.outputs())
}

fn both<E: Host + Element>(call: &MaskedCall) -> Passes {
    let (p, missing) = (&call.problem.attention, call.missing);
    let buffers = Buffers::<E>::new(call);
    let forwarded = buffers.forward(call, 0, true)?;
    let grad_out: Vec<E> = narrow(&call.grad_out.values);
    let grad_lse: Option<Vec<f32>> = call.grad_lse.as_ref().map(|g| narrow(g));
    let mut q: Vec<E> = unwritten(&p.q_shape(), missing);
    let [mut k, mut v]: [Vec<E>; 2] = [(); 2].map(|()| unwritten(&p.kv_shape(), missing));
    let mut bias: Option<Vec<f32>> = call.grad_bias.map(|shape| unwritten(&shape, missing));
    let result = engine::masked_backward(
        &call.problem,
        buffers.inputs(call),
        forwarded.saved(p, view(&call.grad_out, &grad_out), grad_lse.as_deref()),
        engine::MaskedGradients {
            q: &mut q,
            k: &mut k,
            v: &mut v,
            bias: bias.as_deref_mut(),
        },
    );
    result.map_err(|error| {
        let rows = [&q, &k, &v].into_iter().all(|x| is_untouched(x));
        Refused::new(error, rows && bias.as_deref().is_none_or(is_untouched))
    })?;
    let grads = Gradients {
        q: widen(&q),
        k: widen(&k),
        v: widen(&v),
        bias: bias.map(|bias| widen(&bias)),
        ..Gradients::default()
    };
    Ok((forwarded.outputs(), grads))
}

impl MaskedEngine for Cpu {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        let [_, counts] = plan(call, call.missing)?.expect("there is a mask");
        Ok(counts)
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        of_element!(call.problem.attention.element, forward(call))
    }

    fn masked(&self, call: &MaskedCall) -> Passes {
        of_element!(call.problem.attention.element, both(call))
    }
}

//! `flash-dma-cpu`.

use super::{MaskedCall, MaskedEngine, MaskedGradients};
use crate::engines::cpu::{Forwarded, view};
use crate::engines::{Cpu, Host, is_untouched, narrow, sentinels, widen};
use crate::{Outputs, Raw, Refused};
use flash_dma_cpu::{self as engine, BroadcastView, Element, View};
use flash_dma_problem::{AttentionError, ElementType};
use half::{bf16, f16};

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
    result.map_err(|error| refused(error, bits.iter().chain(&counts).all(|&n| n == u32::MAX)))?;
    Ok(Some([bits, counts]))
}

/// The typed buffers of a call.
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

    /// The results, with what a backward pass gets besides if it is wanted.
    fn forward(
        &self,
        call: &MaskedCall,
        missing: usize,
        for_backward: bool,
    ) -> Result<Forwarded<E>, Refused> {
        let p = &call.problem.attention;
        let len = |shape: &[usize]| shape.iter().product::<usize>() - missing;
        let mut out: Vec<E> = sentinels(len(&p.q_shape()));
        let mut lse: Vec<f32> = sentinels(len(&p.lse_shape()));
        let residual = p.residual_shape().filter(|_| for_backward);
        let mut residual: Option<Vec<E>> = residual.map(|shape| sentinels(len(&shape)));
        let mut lse_rest: Option<Vec<f32>> = for_backward.then(|| sentinels(lse.len()));
        let outputs = engine::Outputs {
            out: &mut out,
            residual: residual.as_deref_mut(),
            lse: &mut lse,
            lse_rest: lse_rest.as_deref_mut(),
        };
        let result = engine::masked_forward(&call.problem, self.inputs(call), outputs);
        result.map_err(|error| refused(error, is_untouched(&out) && is_untouched(&lse)))?;
        Ok(Forwarded {
            out,
            lse,
            lse_rest,
            residual,
        })
    }
}

fn refused(error: AttentionError, untouched: bool) -> Refused {
    Refused {
        error,
        written: !untouched,
    }
}

fn forward<E: Host + Element>(call: &MaskedCall) -> Result<Outputs, Refused> {
    let Forwarded { out, lse, .. } = Buffers::<E>::new(call).forward(call, call.missing, false)?;
    Ok(Outputs {
        out: widen(&out),
        lse: widen(&lse),
    })
}

fn both<E: Host + Element>(call: &MaskedCall) -> Result<(Outputs, MaskedGradients), Refused> {
    let p = &call.problem.attention;
    let buffers = Buffers::<E>::new(call);
    let Forwarded {
        out,
        lse,
        lse_rest,
        residual,
    } = buffers.forward(call, 0, true)?;
    let placed = View::contiguous(&out, p.q_shape());
    let grad_out: Vec<E> = narrow(&call.grad_out.values);
    let grad_lse: Option<Vec<f32>> = call.grad_lse.as_ref().map(|g| narrow(g));
    let len = |shape: &[usize]| shape.iter().product::<usize>() - call.missing;
    let mut q: Vec<E> = sentinels(len(&p.q_shape()));
    let [mut k, mut v]: [Vec<E>; 2] = [(); 2].map(|()| sentinels(len(&p.kv_shape())));
    let mut bias: Option<Vec<f32>> = call.grad_bias.map(|shape| sentinels(len(&shape)));
    let result = engine::masked_backward(
        &call.problem,
        buffers.inputs(call),
        engine::Saved {
            out: placed,
            residual: (residual.as_ref()).map(|residual| View::contiguous(residual, p.q_shape())),
            lse: &lse,
            lse_rest: lse_rest.as_deref(),
            grad_out: view(&call.grad_out, &grad_out),
            grad_lse: grad_lse.as_deref(),
        },
        engine::MaskedGradients {
            q: &mut q,
            k: &mut k,
            v: &mut v,
            bias: bias.as_deref_mut(),
        },
    );
    result.map_err(|error| {
        let rows = [&q, &k, &v].into_iter().all(|x| is_untouched(x));
        refused(error, rows && bias.as_deref().is_none_or(is_untouched))
    })?;
    Ok((
        Outputs {
            out: widen(&out),
            lse: widen(&lse),
        },
        MaskedGradients {
            q: widen(&q),
            k: widen(&k),
            v: widen(&v),
            bias: bias.map(|bias| widen(&bias)),
        },
    ))
}

impl MaskedEngine for Cpu {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        let [_, counts] = plan(call, call.missing)?.expect("there is a mask");
        Ok(counts)
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        match call.problem.attention.element {
            ElementType::F32 => forward::<f32>(call),
            ElementType::F16 => forward::<f16>(call),
            ElementType::Bf16 => forward::<bf16>(call),
        }
    }

    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), Refused> {
        match call.problem.attention.element {
            ElementType::F32 => both::<f32>(call),
            ElementType::F16 => both::<f16>(call),
            ElementType::Bf16 => both::<bf16>(call),
        }
    }
}

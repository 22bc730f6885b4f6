//! `flash-dma-cpu`.

use super::{MaskedCall, MaskedEngine, MaskedGradients};
use crate::Outputs;
use crate::engines::Cpu;
use crate::engines::{Host, narrow, sentinels, widen};
use flash_dma_cpu::{self as engine, BroadcastView, Element, View};
use flash_dma_problem::{AttentionError, ElementType};
use half::{bf16, f16};

/// The bits and counts of the call's mask.
fn plan(call: &MaskedCall) -> Option<(Vec<u32>, Vec<u32>)> {
    let mask = call.inputs.visible.as_ref()?;
    let geometry = call.problem().plan.expect("there is a mask");
    let words = |shape: &[usize]| vec![u32::MAX; shape.iter().product()];
    let mut bits = words(&geometry.bits_shape());
    let mut counts = words(&geometry.counts_shape());
    let bytes: Vec<u8> = (mask.values.iter())
        .map(|&shown| u8::from(shown != call.hidden))
        .collect();
    let view = BroadcastView::contiguous(&bytes, mask.shape);
    engine::plan(&geometry, view, call.hidden, &mut bits, &mut counts).expect("a good plan");
    Some((bits, counts))
}

fn run<E: Host + Element>(call: &MaskedCall) -> Result<(Outputs, MaskedGradients), AttentionError> {
    let (problem, inputs) = (call.problem(), &call.inputs);
    let p = &problem.attention;
    let plan = plan(call);
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|x| narrow::<E>(x));
    let bias: Option<Vec<f32>> = inputs.bias.as_ref().map(|b| narrow(&b.values));
    let shapes = inputs.bias.as_ref().map(|b| b.shape);
    let inputs = engine::MaskedInputs {
        q: View::contiguous(&q, p.q_shape()),
        k: View::contiguous(&k, p.kv_shape()),
        v: View::contiguous(&v, p.kv_shape()),
        bits: plan.as_ref().map(|(bits, _)| &bits[..]),
        bias: (bias.as_ref().zip(shapes)).map(|(b, shape)| BroadcastView::contiguous(b, shape)),
    };
    let mut out: Vec<E> = sentinels(q.len());
    let mut lse: Vec<f32> = sentinels(q.len() / p.head_dim);
    engine::masked_forward(&problem, inputs, &mut out, &mut lse)?;
    let grad_out: Vec<E> = narrow(&call.grad_out);
    let grad_lse: Option<Vec<f32>> = call.grad_lse.as_ref().map(|g| narrow(g));
    let (mut dq, mut dk, mut dv) = (
        sentinels::<E>(q.len()),
        sentinels::<E>(k.len()),
        sentinels::<E>(v.len()),
    );
    let mut dbias: Option<Vec<f32>> = bias.as_ref().map(|b| sentinels(b.len()));
    engine::masked_backward(
        &problem,
        inputs,
        engine::Saved {
            out: View::contiguous(&out, p.q_shape()),
            lse: &lse,
            grad_out: View::contiguous(&grad_out, p.q_shape()),
            grad_lse: grad_lse.as_deref(),
        },
        engine::MaskedGradients {
            q: &mut dq,
            k: &mut dk,
            v: &mut dv,
            bias: dbias.as_deref_mut(),
        },
    )?;
    Ok((
        Outputs {
            out: widen(&out),
            lse: widen(&lse),
        },
        MaskedGradients {
            q: widen(&dq),
            k: widen(&dk),
            v: widen(&dv),
            bias: dbias.map(|b| widen(&b)),
        },
    ))
}

impl MaskedEngine for Cpu {
    fn counts(&self, call: &MaskedCall) -> Vec<u32> {
        plan(call).expect("there is a mask").1
    }

    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), AttentionError> {
        match call.inputs.problem.element {
            ElementType::F32 => run::<f32>(call),
            ElementType::F16 => run::<f16>(call),
            ElementType::Bf16 => run::<bf16>(call),
        }
    }
}

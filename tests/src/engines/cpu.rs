//! `flash-dma-cpu`.

use super::{Host, is_untouched, narrow, sentinels, widen};
use crate::{Call, Engine, Gradients, Outputs, Raw, Refused, Size};
use flash_dma_cpu as engine;
use flash_dma_cpu::View;
use flash_dma_problem::{ElementType, Interval, KeptKeys};
use half::{bf16, f16};

/// The CPU engine.
#[derive(Debug)]
pub struct Cpu;

pub(crate) fn view<'a, E, const R: usize>(raw: &Raw, data: &'a [E]) -> View<'a, E, R> {
    View {
        data,
        shape: raw.shape[..].try_into().expect("a view has a fixed rank"),
        strides: raw.strides[..].try_into().expect("a view has a fixed rank"),
    }
}

/// The typed buffers of a call.
struct Buffers<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    scores: Option<Vec<f32>>,
}

impl<E: Host> Buffers<E> {
    fn new(call: &Call) -> Self {
        Self {
            q: narrow(&call.q.values),
            k: narrow(&call.k.values),
            v: narrow(&call.v.values),
            scores: call.scores.as_ref().map(|z| narrow(&z.values)),
        }
    }

    fn inputs<'a>(&'a self, call: &'a Call) -> engine::Inputs<'a, E> {
        let scored = call.scores.as_ref().zip(self.scores.as_ref());
        engine::Inputs {
            q: view(&call.q, &self.q),
            k: view(&call.k, &self.k),
            v: view(&call.v, &self.v),
            selection: scored.map(|(raw, data)| engine::Selection {
                scores: view(raw, data),
                intervals: call.intervals.as_deref().unwrap_or_default(),
                far: (call.far.as_deref()).map(|ends| engine::Far {
                    ends,
                    left_out: (call.left_out.as_ref())
                        .map(|(from, how)| engine::LeftOut { from, how: *how }),
                }),
            }),
        }
    }
}

/// The results of a forward pass.
pub(crate) struct Forwarded<E> {
    pub(crate) out: Vec<E>,
    pub(crate) lse: Vec<f32>,
    pub(crate) lse_rest: Option<Vec<f32>>,
    pub(crate) residual: Option<Vec<E>>,
}

/// The forward pass, with what a backward pass gets besides if it is wanted.
fn forward<E: Host + engine::Element>(
    call: &Call,
    for_backward: bool,
) -> Result<Forwarded<E>, Refused> {
    let p = &call.problem;
    let len = |shape: &[usize]| shape.iter().product::<usize>() - call.missing;
    let mut out: Vec<E> = sentinels(len(&p.q_shape()));
    let mut lse: Vec<f32> = sentinels(len(&p.lse_shape()));
    let residual = p.residual_shape().filter(|_| for_backward);
    let mut residual: Option<Vec<E>> = residual.map(|shape| sentinels(len(&shape)));
    let mut lse_rest: Option<Vec<f32>> = for_backward.then(|| sentinels(lse.len()));
    let buffers = Buffers::new(call);
    let outputs = engine::Outputs {
        out: &mut out,
        residual: residual.as_deref_mut(),
        lse: &mut lse,
        lse_rest: lse_rest.as_deref_mut(),
    };
    engine::forward(p, buffers.inputs(call), outputs).map_err(|error| Refused {
        error,
        written: !(is_untouched(&out) && is_untouched(&lse)),
    })?;
    Ok(Forwarded {
        out,
        lse,
        lse_rest,
        residual,
    })
}

fn backward<E: Host + engine::Element>(call: &Call) -> Result<(Outputs, Gradients), Refused> {
    let p = &call.problem;
    let whole = Call {
        missing: 0,
        ..call.clone()
    };
    let Forwarded {
        out,
        lse,
        lse_rest,
        residual,
    } = forward::<E>(&whole, true)?;
    let outputs = Outputs {
        out: widen(&out),
        lse: widen(&lse),
    };
    let placed = Raw::new(&outputs.out, &p.q_shape(), p.element, call.layout);
    let (out, grad_out): (Vec<E>, Vec<E>) = (narrow(&placed.values), narrow(&call.grad_out.values));
    let grad_lse: Option<Vec<f32>> = call.grad_lse.as_ref().map(|g| narrow(g));
    let len = |shape: &[usize]| shape.iter().product::<usize>() - call.missing;
    let mut q: Vec<E> = sentinels(len(&p.q_shape()));
    let [mut k, mut v]: [Vec<E>; 2] = [(); 2].map(|()| sentinels(len(&p.kv_shape())));
    let mut scores: Option<Vec<f32>> = p.has_scores.then(|| sentinels(len(&p.scores_shape())));
    let mut rank: Option<Vec<f32>> = (call.far.as_ref()).map(|_| sentinels(len(&p.scores_shape())));
    let buffers = Buffers::new(call);
    engine::backward(
        p,
        buffers.inputs(call),
        engine::Saved {
            out: view(&placed, &out),
            residual: (residual.as_ref()).map(|residual| View::contiguous(residual, p.q_shape())),
            lse: &lse,
            lse_rest: lse_rest.as_deref(),
            grad_out: view(&call.grad_out, &grad_out),
            grad_lse: grad_lse.as_deref(),
        },
        engine::Gradients {
            q: &mut q,
            k: &mut k,
            v: &mut v,
            scores: scores.as_deref_mut(),
            rank: rank.as_deref_mut(),
        },
    )
    .map_err(|error| {
        let untouched = [&q, &k, &v].into_iter().all(|x| is_untouched(x))
            && (scores.iter().chain(&rank)).all(|x| is_untouched(x));
        Refused {
            error,
            written: !untouched,
        }
    })?;
    let grads = Gradients {
        q: widen(&q),
        k: widen(&k),
        v: widen(&v),
        scores: scores.map(|z| widen(&z)),
        rank: rank.map(|z| widen(&z)),
        sink: None,
    };
    Ok((outputs, grads))
}

impl Engine for Cpu {
    const NAME: &'static str = "cpu";
    const SIZE: Size = Size::Medium;

    fn new() -> Self {
        Self
    }

    fn supports(&self, _element: ElementType) -> bool {
        true
    }

    fn select(&self, scores: &Raw, kept: impl Into<KeptKeys>) -> Result<Vec<Interval>, Refused> {
        let sentinel = Interval {
            first: u32::MAX,
            end: u32::MAX,
        };
        let mut intervals = vec![sentinel; scores.shape.iter().product()];
        let data: Vec<f32> = narrow(&scores.values);
        match engine::select(view(scores, &data), kept, &mut intervals) {
            Ok(()) => Ok(intervals),
            Err(error) => Err(Refused {
                error,
                written: intervals.iter().any(|&i| i != sentinel),
            }),
        }
    }

    fn forward(&self, call: &Call) -> Result<Outputs, Refused> {
        fn run<E: Host + engine::Element>(call: &Call) -> Result<Outputs, Refused> {
            let Forwarded { out, lse, .. } = forward::<E>(call, false)?;
            Ok(Outputs {
                out: widen(&out),
                lse: widen(&lse),
            })
        }
        match call.problem.element {
            ElementType::F32 => run::<f32>(call),
            ElementType::F16 => run::<f16>(call),
            ElementType::Bf16 => run::<bf16>(call),
        }
    }

    fn backward(&self, call: &Call) -> Result<(Outputs, Gradients), Refused> {
        match call.problem.element {
            ElementType::F32 => backward::<f32>(call),
            ElementType::F16 => backward::<f16>(call),
            ElementType::Bf16 => backward::<bf16>(call),
        }
    }
}

//! `flash-dma-cpu`.

use super::{Host, is_untouched, narrow, of_element, sentinels, widen};
use crate::{Call, Engine, Gradients, Outputs, Passes, Raw, Refused, Size};
use flash_dma_cpu as engine;
use flash_dma_cpu::{Element, View};
use flash_dma_problem::{AttentionError, ElementType, Interval, KeptKeys, Problem};

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

/// The buffer of a result, without the elements that are `missing`.
pub(crate) fn unwritten<E: Host>(shape: &[usize], missing: usize) -> Vec<E> {
    sentinels(shape.iter().product::<usize>() - missing)
}

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
                learning: (call.runner_up_ends.as_deref()).map(|ends| engine::RankLearning {
                    ends,
                    max_live: call.most_until_far(),
                    kept_from: call.kept_from.as_deref(),
                }),
            }),
        }
    }
}

pub(crate) struct Forwarded<E> {
    out: Vec<E>,
    lse: Vec<f32>,
    /// The rounding errors of `out` and of `lse`, if a backward pass is to read them; f32 has no residual.
    residual: Option<Vec<E>>,
    lse_rest: Option<Vec<f32>>,
}

impl<E: Host + Element> Forwarded<E> {
    /// Runs the pass; `for_backward` also with the results that a backward pass reads.
    pub(crate) fn run(
        p: &Problem,
        missing: usize,
        for_backward: bool,
        run: impl FnOnce(engine::Outputs<'_, E>) -> Result<(), AttentionError>,
    ) -> Result<Self, Refused> {
        let residual = p.residual_shape().filter(|_| for_backward);
        let mut to = Self {
            out: unwritten(&p.q_shape(), missing),
            lse: unwritten(&p.lse_shape(), missing),
            residual: residual.map(|shape| unwritten(&shape, missing)),
            lse_rest: for_backward.then(|| unwritten(&p.lse_shape(), missing)),
        };
        let outputs = engine::Outputs {
            out: &mut to.out,
            residual: to.residual.as_deref_mut(),
            lse: &mut to.lse,
            lse_rest: to.lse_rest.as_deref_mut(),
        };
        let result = run(outputs);
        let untouched = || is_untouched(&to.out) && is_untouched(&to.lse);
        result.map_err(|error| Refused::new(error, untouched()))?;
        Ok(to)
    }

    pub(crate) fn outputs(&self) -> Outputs {
        Outputs {
            out: widen(&self.out),
            lse: widen(&self.lse),
        }
    }

    /// The results that a backward pass reads, with the gradients of `out` and the LSE.
    pub(crate) fn saved<'a>(
        &'a self,
        p: &Problem,
        grad_out: View<'a, E, 4>,
        grad_lse: Option<&'a [f32]>,
    ) -> engine::Saved<'a, E> {
        let residual = self.residual.as_ref();
        engine::Saved {
            out: View::contiguous(&self.out, p.q_shape()),
            residual: residual.map(|residual| View::contiguous(residual, p.q_shape())),
            lse: &self.lse,
            lse_rest: self.lse_rest.as_deref(),
            grad_out,
            grad_lse,
        }
    }
}

/// Runs the forward pass; if requested, also with the results that a backward pass reads.
fn run_forward<E: Host + Element>(
    call: &Call,
    missing: usize,
    for_backward: bool,
) -> Result<Forwarded<E>, Refused> {
    let (p, buffers) = (&call.problem, Buffers::new(call));
    Forwarded::run(p, missing, for_backward, |outputs| {
        engine::forward(p, buffers.inputs(call), outputs)
    })
}

fn forward<E: Host + Element>(call: &Call) -> Result<Outputs, Refused> {
    Ok(run_forward::<E>(call, call.missing, false)?.outputs())
}

fn backward<E: Host + Element>(call: &Call) -> Passes {
    let (p, missing) = (&call.problem, call.missing);
    let forwarded = run_forward::<E>(call, 0, true)?;
    let outputs = forwarded.outputs();
    let placed = Raw::new(&outputs.out, &p.q_shape(), p.element, call.layout);
    let (out, grad_out): (Vec<E>, Vec<E>) = (narrow(&placed.values), narrow(&call.grad_out.values));
    let grad_lse: Option<Vec<f32>> = call.grad_lse.as_ref().map(|g| narrow(g));
    let mut q: Vec<E> = unwritten(&p.q_shape(), missing);
    let [mut k, mut v]: [Vec<E>; 2] = [(); 2].map(|()| unwritten(&p.kv_shape(), missing));
    let of_keys = |has: bool| has.then(|| unwritten(&p.scores_shape(), missing));
    let mut scores: Option<Vec<f32>> = of_keys(p.scores_learn);
    let mut rank: Option<Vec<f32>> = of_keys(call.runner_up_ends.is_some());
    let buffers = Buffers::new(call);
    let saved = forwarded.saved(p, view(&call.grad_out, &grad_out), grad_lse.as_deref());
    let result = engine::backward(
        p,
        buffers.inputs(call),
        engine::Saved {
            out: view(&placed, &out),
            ..saved
        },
        engine::Gradients {
            q: &mut q,
            k: &mut k,
            v: &mut v,
            scores: scores.as_deref_mut(),
            rank: rank.as_deref_mut(),
        },
    );
    result.map_err(|error| {
        let untouched = [&q, &k, &v].into_iter().all(|x| is_untouched(x))
            && (scores.iter().chain(&rank)).all(|x| is_untouched(x));
        Refused::new(error, untouched)
    })?;
    let grads = Gradients {
        q: widen(&q),
        k: widen(&k),
        v: widen(&v),
        scores: scores.map(|z| widen(&z)),
        rank: rank.map(|z| widen(&z)),
        ..Gradients::default()
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
        let result = engine::select(view(scores, &data), kept, &mut intervals);
        let untouched = || intervals.iter().all(|&i| i == sentinel);
        result.map_err(|error| Refused::new(error, untouched()))?;
        Ok(intervals)
    }

    fn forward(&self, call: &Call) -> Result<Outputs, Refused> {
        of_element!(call.problem.element, forward(call))
    }

    fn backward(&self, call: &Call) -> Passes {
        of_element!(call.problem.element, backward(call))
    }
}

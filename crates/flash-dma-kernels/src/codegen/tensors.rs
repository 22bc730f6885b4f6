//! Tensors of undefined content in the shapes of problems, with which every call of the gate is made.

use crate::args::{Gradients, Inputs, Outputs, Saved, Selection};
use crate::backward::Backward;
use crate::decode::args::{Cache, Pages, Slots, StepInputs, StepOutputs, Tokens};
use crate::host::engine::Engine;
use crate::pattern::mask::args::{MaskBits, MaskedGradients, MaskedInputs};
use crate::product::Operands;
use crate::{
    CacheShape, DecodeProblem, ElementType, MaskedProblem, PlanGeometry, Problem, Storage,
};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, contiguous_strides};

pub(crate) fn tensor<const R: usize>(
    client: &Client,
    shape: [usize; R],
    elem_size: usize,
) -> TensorBinding {
    let strides = contiguous_strides(&shape).collect();
    let handle = client.empty(shape.iter().product::<usize>() * elem_size);
    // SAFETY: the buffer holds the product of the shape, and the strides are those of that shape.
    unsafe { TensorBinding::from_raw_parts(handle, strides, shape.into()) }
}

/// The tensors of both passes.
pub(crate) struct Attention<P: Backward> {
    pub inputs: P::Inputs,
    pub saved: Saved,
    pub grads: P::Gradients,
}

/// Everything that the forward pass saves, with a residual in 16 bits, and the incoming gradients.
fn saved(client: &Client, p: &Problem) -> Saved {
    let rows = || tensor(client, p.q_shape(), p.element.size());
    let lse = tensor(client, p.lse_shape(), 4);
    Saved {
        out: rows(),
        residual: p.residual_shape().map(|_| rows()),
        lse: lse.clone(),
        lse_rest: Some(lse.clone()),
        grad_out: rows(),
        grad_lse: Some(lse),
    }
}

impl Attention<Problem> {
    /// Without runners-up.
    pub(crate) fn scored(client: &Client, p: &Problem) -> Self {
        let [q, grad_q] = [(); 2].map(|()| tensor(client, p.q_shape(), p.element.size()));
        let [k, v, grad_k, grad_v] =
            [(); 4].map(|()| tensor(client, p.kv_shape(), p.element.size()));
        let words = || tensor(client, p.scores_shape(), 4);
        let selection = p.has_scores.then(|| Selection {
            scores: words(),
            intervals: tensor(client, p.intervals_shape(), 4),
            learning: None,
        });
        Self {
            inputs: Inputs { q, k, v, selection },
            saved: saved(client, p),
            grads: Gradients {
                q: grad_q,
                k: grad_k,
                v: grad_v,
                scores: p.scores_learn.then(words),
                rank: None,
            },
        }
    }
}

impl Attention<MaskedProblem> {
    pub(crate) fn masked(client: &Client, problem: &MaskedProblem) -> Self {
        let p = &problem.attention;
        let [q, grad_q] = [(); 2].map(|()| tensor(client, p.q_shape(), p.element.size()));
        let [k, v, grad_k, grad_v] =
            [(); 4].map(|()| tensor(client, p.kv_shape(), p.element.size()));
        let bias = || problem.bias.map(|shape| tensor(client, shape, 4));
        Self {
            inputs: MaskedInputs {
                q,
                k,
                v,
                plan: (problem.plan).map(|geometry| mask_bits(client, &geometry)),
                bias: bias(),
            },
            saved: saved(client, p),
            grads: MaskedGradients {
                q: grad_q,
                k: grad_k,
                v: grad_v,
                bias: bias(),
            },
        }
    }
}

impl<P: Backward<Gradients: Clone>> Attention<P> {
    /// The outputs that are saved; without a residual those of a call that needs no gradients.
    pub(crate) fn outputs(&self) -> Outputs {
        let Saved { residual, .. } = &self.saved;
        Outputs {
            out: self.saved.out.clone(),
            residual: residual.clone(),
            lse: self.saved.lse.clone(),
            lse_rest: (self.saved.lse_rest.clone()).filter(|_| residual.is_some()),
        }
    }

    /// Runs the forward pass, on a given engine or the one that is chosen.
    pub(crate) fn forward(
        &self,
        client: &Client,
        problem: &P,
        engine: Option<Engine>,
    ) -> Result<(), AttentionError> {
        let plan = problem.plan_forward(client, &self.inputs, engine)?;
        plan.run(self.outputs())
    }

    /// Runs the backward pass likewise.
    pub(crate) fn backward(
        &self,
        client: &Client,
        problem: &P,
        engine: Option<Engine>,
    ) -> Result<(), AttentionError> {
        let plan = problem.plan_backward(client, &self.inputs, &self.saved, engine)?;
        plan.run(self.grads.clone())
    }
}

pub(crate) fn mask_bits(client: &Client, geometry: &PlanGeometry) -> MaskBits {
    MaskBits {
        bits: tensor(client, geometry.bits_shape(), 4),
        counts: tensor(client, geometry.counts_shape(), 4),
    }
}

pub(crate) fn cache(client: &Client, shape: &CacheShape) -> Cache {
    let kv = shape.kv_shape();
    let rows = || tensor(client, kv, shape.element.size());
    let words = || tensor(client, [kv[0], kv[1], kv[2]], 4);
    let counts = tensor(client, [shape.batch], 4);
    match shape.storage {
        Storage::Pages { max_pages, .. } => Cache::Pages(Pages {
            k: rows(),
            v: rows(),
            scores: shape.has_scores().then(words),
            table: tensor(client, [shape.batch, max_pages], 4),
            lengths: counts,
        }),
        _ => Cache::Slots(Slots {
            k: rows(),
            v: rows(),
            score: words(),
            position: words(),
            seen: counts,
        }),
    }
}

pub(crate) fn tokens(client: &Client, shape: &CacheShape, tokens: usize) -> Tokens {
    let [batch, heads] = [shape.batch, shape.kv_heads];
    let new = [batch, heads, tokens, shape.head_dim];
    let rows = || tensor(client, new, shape.element.size());
    Tokens {
        k: rows(),
        v: rows(),
        scores: (shape.has_scores()).then(|| tensor(client, [batch, heads, tokens], 4)),
    }
}

pub(crate) fn step(client: &Client, problem: &DecodeProblem) -> (StepInputs, StepOutputs) {
    let append = &problem.append;
    let rows = || tensor(client, problem.q_shape(), append.cache.element.size());
    let inputs = StepInputs {
        q: rows(),
        tokens: tokens(client, &append.cache, append.tokens),
    };
    let outputs = StepOutputs {
        cache: cache(client, &append.cache),
        out: rows(),
        lse: tensor(client, problem.lse_shape(), 4),
    };
    (inputs, outputs)
}

/// The factors of a product of these sizes; for each, true if its columns are contiguous instead of its rows.
pub(crate) fn operands(
    client: &Client,
    [m, n, k]: [usize; 3],
    turned: [bool; 2],
    element: ElementType,
) -> Operands {
    let matrix = |[rows, columns]: [usize; 2], turned: bool| {
        let mut matrix = tensor(client, [rows, columns], element.size());
        if turned {
            matrix.strides = [1, rows].into();
        }
        matrix
    };
    Operands {
        a: matrix([m, k], turned[0]),
        b: matrix([k, n], turned[1]),
        element,
    }
}

//! Attention under masks and biases: its calls, its cases, and the engines.

#[cfg(feature = "burn")]
mod burn;
mod case;
mod cpu;
#[cfg(feature = "kernels")]
mod kernels;
#[cfg(feature = "kernels")]
pub mod plans;

pub use case::{MaskedCase, Pattern, top_of_bias};

use crate::{Engine, Grads, Layout, Outputs, Passes, Raw, Refused};
use flash_dma_problem::{AttentionOptions, ElementType, MaskedProblem, PlanGeometry};
use flash_dma_reference::masked::MaskedInputs;

/// A call of the forward and the backward pass.
#[derive(Clone, Debug)]
pub struct MaskedCall {
    /// Sizes and options.
    pub problem: MaskedProblem,
    /// `q` of the problem.
    pub q: Raw,
    /// `k` of the problem.
    pub k: Raw,
    /// `v` of the problem.
    pub v: Raw,
    /// A nonzero element shows its key, or hides it if [`hidden`](Self::hidden).
    pub mask: Option<Raw>,
    /// True if the mask is passed as the pairs that it hides.
    pub hidden: bool,
    /// The geometry of the mask's plan: the problem's, unless a test uses a different one.
    pub plan: Option<PlanGeometry>,
    /// Added to the logits.
    pub bias: Option<Raw>,
    /// Shape of the buffer for the gradient of the bias, if it is requested.
    pub grad_bias: Option<[usize; 4]>,
    /// The gradient of `out`.
    pub grad_out: Raw,
    /// The gradient of the LSE, contiguous.
    pub grad_lse: Option<Vec<f64>>,
    /// Elements that the buffers of the results lack at their end.
    pub missing: usize,
}

impl MaskedCall {
    /// The call of the oracle's inputs.
    pub fn new(inputs: &MaskedInputs, layout: Layout, hidden: bool, grads: &Grads) -> Self {
        let p = &inputs.problem;
        let (q, kv) = (p.q_shape(), p.kv_shape());
        let mask = inputs.visible.as_ref().map(|mask| &mask.shape[..]);
        let bias = inputs.bias.as_ref().map(|bias| &bias.shape[..]);
        let problem = MaskedProblem::new(&q, &kv, &kv, mask, bias, p.element, &options(p));
        let problem = problem.expect("a good case");
        let place =
            |values: &[f64], shape: [usize; 4], element| Raw::new(values, &shape, element, layout);
        let mask = inputs.visible.as_ref().map(|mask| {
            let flags = mask.values.iter().map(|&shown| f64::from(shown != hidden));
            place(&flags.collect::<Vec<_>>(), mask.shape, ElementType::F32)
        });
        let bias = inputs.bias.as_ref();
        Self {
            q: place(&inputs.q, q, p.element),
            k: place(&inputs.k, kv, p.element),
            v: place(&inputs.v, kv, p.element),
            mask,
            hidden,
            plan: problem.plan,
            bias: bias.map(|bias| place(&bias.values, bias.shape, ElementType::F32)),
            grad_bias: problem.bias,
            grad_out: place(&grads.out, q, p.element),
            grad_lse: grads.lse.clone(),
            missing: 0,
            problem,
        }
    }

    /// The options of the problem.
    pub fn options(&self) -> AttentionOptions {
        options(&self.problem.attention)
    }

    pub(crate) fn mask_bytes(&self) -> Option<(Vec<u8>, &Raw)> {
        let mask = self.mask.as_ref()?;
        let bytes = mask.values.iter().map(|&x| u8::from(x != 0.0));
        Some((bytes.collect(), mask))
    }
}

/// The options of a problem, without a window.
pub(crate) fn options(p: &flash_dma_problem::Problem) -> AttentionOptions {
    AttentionOptions {
        keep_window: None,
        causal: p.causal,
        scale: Some(p.scale),
        softcap: p.softcap,
        alibi: p.alibi,
        deterministic: p.deterministic,
        dropout: p.dropout,
        ..AttentionOptions::new()
    }
}

/// An implementation of attention under masks and biases. The error of a call is the engine's refusal.
pub trait MaskedEngine: Engine {
    /// The counts of the plan of a call's mask, `[batch, heads, query_blocks, key_blocks]`.
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused>;

    /// The forward pass.
    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused>;

    /// The forward pass and then the backward pass.
    fn masked(&self, call: &MaskedCall) -> Passes;
}

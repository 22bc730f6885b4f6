//! The output, with weights that are made when they are asked for.

use super::dropped::dropped;
use super::input::Hidden;
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{FloatDType, Tensor};
use flash_dma_problem::{AttentionOptions, Dropout, ElementType, Problem};

/// The output of [`MultiHeadAttention`](super::MultiHeadAttention).
#[derive(Clone, Debug)]
pub struct MhaOutput {
    /// The context, `[batch, q_len, d_model]`.
    pub context: Tensor<3>,
    pub(super) logits: Logits,
}

/// What weights are made of.
#[derive(Clone, Debug)]
pub(super) struct Logits {
    /// `[batch, n_heads, q_len, d_k]`.
    pub(super) q: Tensor<4>,
    /// `[batch, n_heads, k_len, d_k]`.
    pub(super) k: Tensor<4>,
    pub(super) hidden: Hidden,
    pub(super) quiet: bool,
    /// That of the call.
    pub(super) dropout: Option<Dropout>,
}

/// What stands in for the logit of a hidden pair before the softmax: finite, so that a row without any visible key is
/// no NaN, and so little that its exponential is 0 beside every logit.
const HIDDEN: f32 = -1e30;

impl MhaOutput {
    /// The attention weights, `[batch, n_heads, q_len, k_len]`: in training after dropout, so that rows may not add up
    /// to 1, and zeros for a query from which every key is hidden. Burn's output has a field of this name; here they
    /// are computed when they are asked for, differentiably, from q and k, which the output keeps. Ask before the
    /// context is moved out of the output, or clone it.
    ///
    /// After [`forward_cache`](super::MultiHeadAttention::forward_cache) they are those of the new queries.
    #[must_use]
    pub fn weights(&self) -> Tensor<4> {
        self.logits.weights()
    }
}

impl Logits {
    /// The weights, `[batch, n_heads, q_len, k_len]`, by Burn's operations.
    pub(super) fn weights(&self) -> Tensor<4> {
        let ([batch, heads, q_len, d_k], [_, _, k_len, _]) = (self.q.dims(), self.k.dims());
        let (dtype, device) = (self.q.dtype(), self.q.device());
        if self.q.dims().contains(&0) || k_len == 0 {
            return Tensor::zeros([batch, heads, q_len, k_len], (&device, dtype));
        }
        // Before the product, which may be infinite in 16 bits.
        let [q, k] = [&self.q, &self.k].map(|rows| rows.clone().cast(FloatDType::F32));
        let logits = q.matmul(k.transpose()) / (d_k as f32).sqrt();
        let shape = logits.dims();
        let hidden = self.hidden.pairs([q_len, k_len], &device);
        let hidden = hidden.map(|hidden| hidden.expand(shape));
        let logits = match hidden.clone() {
            Some(hidden) => logits.mask_fill(hidden, HIDDEN),
            None => logits,
        };
        let weights = match self.quiet {
            true => quiet_softmax(logits, 3),
            false => softmax(logits, 3),
        };
        let weights = match hidden {
            Some(hidden) => weights.mask_fill(hidden, 0.0),
            None => weights,
        };
        self.dropped(weights).cast(dtype)
    }

    /// The weights with the call's dropout.
    fn dropped(&self, weights: Tensor<4>) -> Tensor<4> {
        if self.dropout.is_none() {
            return weights;
        }
        let options = AttentionOptions::new()
            .with_causal(self.hidden.causal)
            .with_dropout(self.dropout);
        let (q, k) = (self.q.dims(), self.k.dims());
        let problem = Problem::new(&q, &k, &k, None, ElementType::F32, &options);
        let problem = problem.expect("the call was checked");
        let weights = weights.into_dispatch();
        let device = weights.device();
        Tensor::from_dispatch(dropped::<Dispatch>(weights, &problem, &device))
    }
}

//! The output, with weights computed on request.

use super::input::Hidden;
use crate::fallback::tensors::bool_dtype;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{FloatDType, Shape, Tensor, TensorData};
use flash_dma_problem::dropout::{column_word, row_word};
use flash_dma_problem::{AttentionOptions, Dropout, ElementType, Problem};

/// Output of [`MultiHeadAttention`](super::MultiHeadAttention).
#[derive(Clone, Debug)]
pub struct MhaOutput {
    /// The context, `[batch, q_len, d_model]`.
    pub context: Tensor<3>,
    pub(super) logits: Logits,
}

#[derive(Clone, Debug)]
pub(super) struct Logits {
    /// `[batch, n_heads, q_len, d_k]`.
    pub(super) q: Tensor<4>,
    /// `[batch, n_heads, k_len, d_k]`.
    pub(super) k: Tensor<4>,
    pub(super) hidden: Hidden,
    pub(super) quiet: bool,
    pub(super) dropout: Option<Dropout>,
}

/// Logit of a hidden pair: finite, so that a fully hidden row gives no NaN, and so low that its exponential is 0 next
/// to any visible logit.
const HIDDEN: f32 = -1e30;

impl MhaOutput {
    /// Attention weights, `[batch, n_heads, q_len, k_len]`, computed on request and differentiable. In training they
    /// are those after dropout; a query whose keys are all hidden has zeros. After
    /// [`forward_cache`](super::MultiHeadAttention::forward_cache) they are those of the new queries.
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
        // Cast before the product, which may overflow in 16 bits.
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

    fn dropped(&self, weights: Tensor<4>) -> Tensor<4> {
        let Some(dropout) = self.dropout else {
            return weights;
        };
        let options = AttentionOptions::new().with_causal(self.hidden.causal);
        let options = options.with_dropout(self.dropout);
        let (q, k) = (self.q.dims(), self.k.dims());
        let problem = Problem::new(&q, &k, &k, None, ElementType::F32, &options);
        let problem = problem.expect("the call was checked");
        let weights = weights.into_dispatch();
        let factors = factors::<Dispatch>(&problem, dropout, &weights.device());
        Tensor::from_dispatch(Dispatch::float_mul(weights, factors))
    }
}

/// Dropout factors of all probabilities, `[batch, kv_heads, group * q_len, k_len]`. The words of pairs are computed
/// on the device in i64, which holds every product of a word and half of another.
fn factors<B: Backend>(p: &Problem, dropout: Dropout, device: &B::Device) -> FloatTensor<B> {
    let mask = dropout.mask();
    let pairs = Shape::new([p.batch, p.kv_heads, p.group() * p.q_len, p.k_len]);
    let heads = (0..p.batch * p.q_heads).map(|head| mask.head_word(head));
    let rows = heads.flat_map(|head| {
        (0..p.q_len).map(move |query| i64::from(row_word(head, p.dropout_position(query))))
    });
    let columns = (0..p.k_len).map(|key| column_word(mask.columns, key as u32));
    let halves = columns.map(|word| (i64::from(word & 0xffff), i64::from(word >> 16)));
    let (lower, upper): (Vec<_>, Vec<_>) = halves.unzip();
    let shape = [p.batch, p.kv_heads, p.group() * p.q_len, 1];
    let rows = TensorData::new(rows.collect(), shape);
    let [lower, upper] = [lower, upper].map(|halves| TensorData::new(halves, [1, 1, 1, p.k_len]));
    let [rows, lower, upper] = [rows, lower, upper]
        .map(|words| B::int_expand(B::int_from_data(words, device), pairs.clone()));
    // row * (2^16 upper + lower) modulo 2^32.
    let upper = B::int_mul(rows.clone(), upper);
    let upper = B::bitwise_and_scalar(upper, 0xffff.into());
    let upper = B::bitwise_left_shift_scalar(upper, 16.into());
    let words = B::int_add(B::int_mul(rows, lower), upper);
    let words = B::bitwise_and_scalar(words, i64::from(u32::MAX).into());
    let threshold = i64::from(mask.threshold);
    let dropped = B::int_lower_elem(words, threshold.into(), bool_dtype::<B>(device));
    let weights = B::float_full(pairs, mask.factor.into(), device, FloatDType::F32);
    B::float_mask_fill(weights, dropped, 0.0f32.into())
}

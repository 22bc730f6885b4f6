//! One attention layer whose keys are chosen by learned scores.

use crate::task::{FACTS, LENGTH, SUBJECTS, Texts, VALUES};
use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::{AttentionOptions, dynamic_mask_attention, zoh_scores};

const WIDTH: usize = 64;
const Q_HEADS: usize = 2;
const KV_HEADS: usize = 1;
const HEAD_DIM: usize = 32;

// ANCHOR: model
/// Embeds the tokens, attends once, and reads the answers off the questions' rows.
#[derive(Module, Debug)]
pub struct Model {
    subject: Embedding,
    value: Embedding,
    query: Linear,
    key: Linear,
    values: Linear,
    answer: Linear,
    /// `[KV_HEADS, KV_HEADS * HEAD_DIM]`: from a key's value to its importance.
    pub dt_proj: Param<Tensor<2>>,
    /// `[KV_HEADS]`: whether more of it is better, and how much it counts.
    pub a: Param<Tensor<1>>,
}
// ANCHOR_END: model

// ANCHOR: scores
/// What ranks the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// DMA's scores, learned.
    Learned,
    /// Noise, drawn anew at each call: the control.
    Random,
}
// ANCHOR_END: scores

impl Model {
    /// A model with random parameters.
    pub fn new(device: &Device) -> Self {
        let embed = |count| {
            EmbeddingConfig::new(count, WIDTH)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: 0.5,
                })
                .init(device)
        };
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        // ANCHOR: init
        // Not a = 0: all scores would tie, and no gradient would reach dt_proj. A negative `a` keeps
        // the scores between 0 and 1, so that they rank the keys without drowning q . k.
        let a = Initializer::Constant { value: -1.0 }.init([KV_HEADS], device);
        let dt_proj = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        }
        .init([KV_HEADS, KV_HEADS * HEAD_DIM], device);
        // ANCHOR_END: init
        Self {
            subject: embed(2 * SUBJECTS),
            value: embed(VALUES + 1),
            query: linear(WIDTH, Q_HEADS * HEAD_DIM),
            key: linear(WIDTH, KV_HEADS * HEAD_DIM),
            values: linear(WIDTH, KV_HEADS * HEAD_DIM),
            answer: linear(Q_HEADS * HEAD_DIM, VALUES),
            dt_proj,
            a,
        }
    }

    // ANCHOR: forward
    /// Logits of the answers `[batch * FACTS, VALUES]`, and the scores `[batch, KV_HEADS, LENGTH]`.
    pub fn forward(&self, texts: &Texts, scores: Scores, window: usize) -> (Tensor<2>, Tensor<3>) {
        let x =
            self.subject.forward(texts.subjects.clone()) + self.value.forward(texts.values.clone());
        let [batch, length, _] = x.dims();
        // [batch, length, heads * head_dim] -> [batch, heads, length, head_dim], without a copy.
        let heads = |x: Tensor<3>, count: usize| {
            x.reshape([batch, length, count, HEAD_DIM]).swap_dims(1, 2)
        };
        let q = heads(self.query.forward(x.clone()), Q_HEADS);
        let k = heads(self.key.forward(x.clone()), KV_HEADS);
        let v = heads(self.values.forward(x), KV_HEADS);

        let scores = match scores {
            Scores::Learned => zoh_scores(v.clone(), self.dt_proj.val(), self.a.val()),
            Scores::Random => Tensor::random(
                [batch, KV_HEADS, length],
                Distribution::Default,
                &v.device(),
            ),
        };
        let options = AttentionOptions::new().with_keep_window(window);
        let out = dynamic_mask_attention(q, k, v, scores.clone(), options);

        let questions = out
            .slice([0..batch, 0..Q_HEADS, LENGTH - FACTS..LENGTH, 0..HEAD_DIM])
            .swap_dims(1, 2)
            .reshape([batch * FACTS, Q_HEADS * HEAD_DIM]);
        (self.answer.forward(questions), scores)
    }
    // ANCHOR_END: forward
}

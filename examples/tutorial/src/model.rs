//! One attention layer that selects its keys by learned scores.

use crate::task::{FACTS, LENGTH, SUBJECTS, Texts, VALUES};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::{Attention, Intervals, Selector, linear_scores, zoh_scores};
use std::sync::{Mutex, PoisonError};

const WIDTH: usize = 128;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const INITIAL_SCORES: f64 = 0.0002;

// ANCHOR: model
/// Embeds the tokens, attends once, and reads the answers from the questions' rows.
#[derive(Module, Debug)]
pub struct Model {
    subject: Embedding,
    value: Embedding,
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    values: Linear,
    /// `[WIDTH, KV_HEADS]`: from a token to the score of its key.
    pub score_proj: Param<Tensor<2>>,
    answer: Linear,
    /// For the control, `[KV_HEADS, KV_HEADS * HEAD_DIM]`: from a key's value to its score.
    pub dt_proj: Param<Tensor<2>>,
    /// For the control, `[KV_HEADS]`: sign and weight of the score.
    pub a: Param<Tensor<1>>,
}
// ANCHOR_END: model

/// Scores that rank the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// A learned linear function of the token.
    Linear,
    /// The paper's learned, bounded function of the value.
    Zoh,
    /// Noise, drawn anew at each call: the control.
    Random,
}

impl Model {
    /// A model from a seed. Threads share the random numbers of their device, and parameters are drawn on first use:
    /// this draws all parameters of one model at a time.
    pub fn seeded(seed: u64, device: &Device) -> Self {
        static DRAWING: Mutex<()> = Mutex::new(());
        let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
        device.seed(seed);
        let model = Self::new(device);
        model.visit(&mut Draw);
        model
    }

    /// A model with random parameters.
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        // ANCHOR: init
        let normal = |std| Initializer::Normal { mean: 0.0, std };
        // Nearly 0, so that at the start no subject is ranked so low that it is never seen: a key that is neither
        // kept nor a runner-up learns nothing.
        let score_proj = normal(INITIAL_SCORES).init([WIDTH, KV_HEADS], device);
        // Not a = 0: all scores would tie, and no gradient would reach dt_proj. A negative `a` keeps the scores
        // between 0 and 1.
        let a = Initializer::Constant { value: -1.0 }.init([KV_HEADS], device);
        let dt_proj = normal(0.1).init([KV_HEADS, KV_HEADS * HEAD_DIM], device);
        // ANCHOR_END: init
        let embed = |count| {
            let config = EmbeddingConfig::new(count, WIDTH);
            config.with_initializer(normal(0.5)).init(device)
        };
        Self {
            subject: embed(2 * SUBJECTS),
            value: embed(VALUES + 1),
            norm: RmsNormConfig::new(WIDTH).init(device),
            query: linear(WIDTH, Q_HEADS * HEAD_DIM),
            key: linear(WIDTH, KV_HEADS * HEAD_DIM),
            values: linear(WIDTH, KV_HEADS * HEAD_DIM),
            score_proj,
            answer: linear(Q_HEADS * HEAD_DIM, VALUES),
            dt_proj,
            a,
        }
    }

    // ANCHOR: forward
    /// Logits of the answers `[batch * FACTS, VALUES]`, and the selection.
    pub fn forward(
        &self,
        texts: &Texts,
        scores: Scores,
        selector: &Selector,
    ) -> (Tensor<2>, Intervals) {
        let x =
            self.subject.forward(texts.subjects.clone()) + self.value.forward(texts.values.clone());
        let x = self.norm.forward(x);
        let [batch, length, _] = x.dims();
        // [batch, length, heads * head_dim] -> [batch, heads, length, head_dim], without a copy.
        let heads = |x: Tensor<3>, count: usize| {
            x.reshape([batch, length, count, HEAD_DIM]).swap_dims(1, 2)
        };
        let q = heads(self.query.forward(x.clone()), Q_HEADS);
        let k = heads(self.key.forward(x.clone()), KV_HEADS);
        let v = heads(self.values.forward(x.clone()), KV_HEADS);

        let scores = match scores {
            Scores::Linear => linear_scores(x, self.score_proj.val()),
            Scores::Zoh => zoh_scores(v.clone(), self.dt_proj.val(), self.a.val()),
            Scores::Random => {
                let shape = [batch, KV_HEADS, length];
                Tensor::random(shape, Distribution::Default, &v.device())
            }
        };
        let intervals = selector.select(scores.clone());
        let attention = Attention::new(q, k, v).scores(scores);
        let out = attention.intervals(&intervals).forward();

        let questions = out
            .slice([0..batch, 0..Q_HEADS, LENGTH - FACTS..LENGTH, 0..HEAD_DIM])
            .swap_dims(1, 2)
            .reshape([batch * FACTS, Q_HEADS * HEAD_DIM]);
        (self.answer.forward(questions), intervals)
    }
    // ANCHOR_END: forward
}

/// Makes every parameter draw its initial value.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let _ = param.val();
    }
}

//! A small transformer whose layers choose their keys as an [`Arm`](crate::arm::Arm) says.
//!
//! ```text
//! tokens [B, N] ── embedding ── + the token before ── block × layers ── RMSNorm ── questions' rows ── linear ── answers
//! ```
//!
//! The token before is added through a projection (a convolution of two taps), which binds a value to its key before
//! the first layer: the arms then differ in what they keep, not in whether a layer has learned to bind pairs.

use crate::arm::Scores;
use crate::keys::{Place, without_scores};
use crate::settings::{Settings, Sizes};
use crate::task::{Batch, Text};
use burn::module::{Initializer, Module, ModuleVisitor, Param};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig,
};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::train::embed;
use burn_flash_dma::{
    Attention, AttentionError, HeadEncoding, Intervals, ScoreRole, linear, rms_norm, swiglu,
};
use train_text::model::CastTo;
use train_text::turns;

/// The most that a bounded score adds to a logit.
const BOUND: f32 = 4.0;

/// The part of what runners-up gain that kept keys lose where scores are centred: all of it made both heads of a layer
/// rank alike.
const CENTRED: f32 = 0.1;

/// The model.
#[derive(Module, Debug)]
pub struct Model {
    embedding: Embedding,
    before: Linear,
    /// The blocks.
    pub blocks: Vec<Block>,
    norm: RmsNorm,
    answer: Linear,
    #[module(skip)]
    settings: Settings,
}

/// A pre-norm block: attention, then a feed-forward network.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    /// The layer that the arms share.
    pub attention: DynamicMaskAttention,
    feed_forward_norm: RmsNorm,
    feed_forward: SwiGlu,
    feed_forward_out: Linear,
}

/// What a layer attends to in a pass.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The selection; `None` of all keys.
    pub intervals: Option<Intervals>,
    /// The scores `[batch, kv_heads, len]` that have made it; `None` for an arm without any.
    pub scores: Option<Tensor<3>>,
}

impl Model {
    /// A model with random parameters, all drawn before it returns: equal ones for the arms with the same score form.
    pub fn new(settings: &Settings, device: &Device) -> Self {
        let (sizes, task) = (settings.sizes, settings.task());
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let model = Self {
            embedding: EmbeddingConfig::new(task.vocabulary(), sizes.width)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: 0.1,
                })
                .init(device),
            before: linear(sizes.width, sizes.width),
            blocks: (0..sizes.layers)
                .map(|number| Block::new(number, settings, device))
                .collect(),
            norm: RmsNormConfig::new(sizes.width).init(device),
            answer: linear(sizes.width, task.kinds),
            settings: settings.clone(),
        };
        model.visit(&mut Draw);
        model
    }

    /// Keeps so many keys from now on; nothing else changes, so recent keys stay as many.
    ///
    /// # Panics
    ///
    /// If it is 0.
    pub fn set_window(&mut self, window: usize) {
        self.settings.window = window;
        if self.settings.arm.is_pruned() {
            for block in &mut self.blocks {
                block.attention.set_keep_window(window);
            }
        }
    }

    /// The logits of the answers, `[batch * pairs, kinds]`.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the window is 0 or the device fails.
    pub fn forward(&self, batch: &Batch) -> Result<Tensor<2>, AttentionError> {
        self.forward_seen(batch, |_, _| Ok(()))
    }

    /// The logits, and what every layer attends to.
    ///
    /// # Errors
    ///
    /// Those of [`forward`](Self::forward).
    pub fn forward_and_seen(
        &self,
        batch: &Batch,
    ) -> Result<(Tensor<2>, Vec<Seen>), AttentionError> {
        let mut seen = Vec::new();
        let logits = self.forward_seen(batch, |number, x| {
            let layer = &self.computing(&self.blocks[number]).attention;
            let scores =
                (self.settings.arm.scores() != Scores::None).then(|| layer.scores(x.clone()));
            let intervals = match self.settings.arm.scores() {
                Scores::None => self.keys(number, layer, x, &batch.texts)?,
                _ => Some(layer.try_selection(x.clone())?),
            };
            seen.push(Seen { intervals, scores });
            Ok(())
        })?;
        Ok((logits, seen))
    }

    /// The logits; `see` gets each layer's number and its input.
    fn forward_seen(
        &self,
        batch: &Batch,
        mut see: impl FnMut(usize, &Tensor<3>) -> Result<(), AttentionError>,
    ) -> Result<Tensor<2>, AttentionError> {
        let x = embed(&self.embedding, batch.tokens.clone(), self.dtype());
        let [texts, len, width] = x.dims();
        let nothing = Tensor::zeros([texts, 1, width], (&x.device(), x.dtype()));
        let before = Tensor::cat(vec![nothing, x.clone().narrow(1, 0, len - 1)], 1);
        let mut x = x + linear(&self.computing(&self.before), before);
        for (number, block) in self.blocks.iter().enumerate() {
            let block = self.computing(block);
            let normal = normalised(&block.attention_norm, x.clone());
            see(number, &normal)?;
            x = x + self.attend(number, &block.attention, normal, &batch.texts)?;
            x = block.feed_forward(x);
        }
        let questions = x
            .reshape([texts * len, width])
            .select(0, batch.rows.clone());
        let norm = self.computing(&self.norm);
        let questions = rms_norm(questions, norm.gamma.val(), norm.epsilon as f32);
        Ok(linear(&self.computing(&self.answer), questions))
    }

    /// The output of a layer under the arm.
    fn attend(
        &self,
        number: usize,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
        texts: &[Text],
    ) -> Result<Tensor<3>, AttentionError> {
        match self.settings.arm.scores() {
            Scores::RankAndBias | Scores::Rank => layer.try_forward(x),
            Scores::RankCentred => {
                let keys = layer.try_selection(x.clone())?;
                let scores = centred(layer.try_scores(x.clone())?, &keys);
                layer.try_forward_with_scores(x, scores)
            }
            scores => {
                let keys = self.keys(number, layer, &x, texts)?;
                let bias = match scores {
                    Scores::RankAndBounded => Some(bounded(layer.try_scores(x.clone())?)),
                    _ => None,
                };
                attend_to(layer, self.settings.sizes, (keys, bias), x)
            }
        }
    }

    /// The selection of an arm, but not of one that leaves it to its layers.
    fn keys(
        &self,
        number: usize,
        layer: &DynamicMaskAttention,
        x: &Tensor<3>,
        texts: &[Text],
    ) -> Result<Option<Intervals>, AttentionError> {
        let [_, len, _] = x.dims();
        match self.settings.arm.scores() {
            // What autodiff would keep of scores that no loss is computed from, no backward pass would free.
            Scores::FrozenRank => {
                let frozen = layer.clone().no_grad();
                Ok(Some(frozen.try_selection(x.clone().detach())?))
            }
            Scores::None => {
                let place = Place {
                    layer: number,
                    kv_heads: self.settings.sizes.kv_heads,
                    window: self.settings.window,
                    texts,
                };
                without_scores(self.settings.arm, place, len, &x.device())
            }
            Scores::Rank | Scores::RankCentred | Scores::RankAndBounded | Scores::RankAndBias => {
                Ok(Some(layer.try_selection(x.clone())?))
            }
        }
    }

    fn dtype(&self) -> FloatDType {
        self.settings.dtype.burn()
    }

    /// A part of the model in the type of the activations.
    fn computing<M: Module>(&self, part: &M) -> M {
        match self.dtype() {
            FloatDType::F32 => part.clone(),
            dtype => part.clone().map(&mut CastTo(dtype)),
        }
    }
}

impl Block {
    /// The block of a number, counted from 0.
    fn new(number: usize, settings: &Settings, device: &Device) -> Self {
        let Settings {
            arm,
            window,
            runners_up,
            ..
        } = *settings;
        let sizes = settings.sizes;
        let hidden = (sizes.width * 8 / 3).next_multiple_of(32);
        let pruned = arm.is_pruned();
        let attention = DynamicMaskAttentionConfig::new(sizes.width, sizes.heads)
            .with_n_kv_heads(Some(sizes.kv_heads))
            .with_max_seq_len(Some(settings.tokens))
            .with_score_form(arm.score_form())
            .with_score_role(Some(match arm.scores() {
                Scores::Rank | Scores::RankCentred | Scores::FrozenRank => ScoreRole::Rank,
                _ => ScoreRole::RankAndBias,
            }))
            .with_keep_window(pruned.then_some(window))
            .with_recent(pruned.then(|| arm.recent(window)))
            .with_runners_up(runners_up.or(arm.runners_up(window)))
            .with_round_robin((settings.round_robin).map(|dealt| turns::of_layer(dealt, number)))
            .with_token_gradient_scale(settings.token_gradient_scale)
            .with_leave_one_out(settings.leave_one_out)
            .with_rank_softmax(settings.rank_softmax)
            .with_learnable_sink(settings.sink);
        Self {
            attention_norm: RmsNormConfig::new(sizes.width).init(device),
            attention: attention.init(device),
            feed_forward_norm: RmsNormConfig::new(sizes.width).init(device),
            feed_forward: SwiGluConfig::new(sizes.width, hidden).init(device),
            feed_forward_out: LinearConfig::new(hidden, sizes.width)
                .with_bias(false)
                .init(device),
        }
    }

    fn feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normal = normalised(&self.feed_forward_norm, x.clone());
        let gate = linear(&self.feed_forward.linear_inner, normal.clone());
        let up = linear(&self.feed_forward.linear_outer, normal);
        x + linear(&self.feed_forward_out, swiglu(gate, up))
    }
}

/// What of a score is added to the logits where it is bounded.
fn bounded(scores: Tensor<3>) -> Tensor<3> {
    (scores / BOUND).tanh() * BOUND
}

/// Scores `[batch, kv_heads, len]` less a part of the mean score of the keys that are kept, each weighted by the number
/// of positions that keep it. A head's scores all change by the same, so the same keys are kept.
fn centred(scores: Tensor<3>, kept: &Intervals) -> Tensor<3> {
    let dims = scores.dims();
    let side = |at: usize| kept.tensor().clone().narrow(3, at, 1).reshape(dims);
    let positions = (side(1) - side(0)).float().cast(scores.dtype());
    let all = positions.clone().sum_dim(2);
    scores.clone() - (scores * positions).sum_dim(2) / all * CENTRED
}

/// A layer's output with these keys, and this added to their logits: what the layer computes otherwise, with its own
/// parameters.
fn attend_to(
    layer: &DynamicMaskAttention,
    sizes: Sizes,
    (keys, bias): (Option<Intervals>, Option<Tensor<3>>),
    x: Tensor<3>,
) -> Result<Tensor<3>, AttentionError> {
    let [batch, len, width] = x.dims();
    let split = |projection: &Linear, heads: usize| {
        let rows = linear(projection, x.clone());
        rows.reshape([batch, len, heads, width / sizes.heads])
    };
    let place = |heads: Tensor<4>, norm: &Option<RmsNorm>| {
        let mut encoding = HeadEncoding::new(heads);
        if let Some(norm) = norm {
            encoding = encoding.norm(norm.gamma.val(), norm.epsilon as f32);
        }
        if let Some(rope) = &layer.rope {
            encoding = encoding.rotary(rope.freq_complex.clone(), 0);
        }
        encoding.try_forward()
    };
    let q = place(split(&layer.q_proj, sizes.heads), &layer.q_norm)?;
    let k = place(split(&layer.k_proj, sizes.kv_heads), &layer.k_norm)?;
    let v = split(&layer.v_proj, sizes.kv_heads).swap_dims(1, 2);
    let attention = Attention::new(q, k, v);
    let sink = layer.sink_logits.as_ref().map(Param::val);
    let out = match (keys, bias) {
        (Some(keys), Some(bias)) => beside(sink, attention.scores(bias).intervals(&keys))?,
        (Some(keys), None) => beside(sink, attention.intervals(&keys))?,
        (None, _) => beside(sink, attention)?,
    };
    let out = out.swap_dims(1, 2).reshape([batch, len, width]);
    Ok(linear(&layer.o_proj, out))
}

/// The output of an attention, beside a logit per head without a key if there are any.
fn beside<S>(
    sink: Option<Tensor<1>>,
    attention: Attention<S>,
) -> Result<Tensor<4>, AttentionError> {
    match sink {
        None => attention.try_forward(),
        Some(logits) => Ok(attention.try_forward_with_sink(logits)?.0),
    }
}

fn normalised(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    rms_norm(x, norm.gamma.val(), norm.epsilon as f32)
}

/// Draws every parameter. Burn draws one when it is first read, so the order, and with it the numbers, would depend on
/// what an arm reads.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let _ = param.val();
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::settings::Size;
    use burn::nn::EmbeddingConfig;
    use burn_flash_dma::LeaveOneOut;
    use burn_flash_dma::nn::Scorer;

    fn settings(arm: Arm) -> Settings {
        Settings {
            window: Settings::window(arm, 64, 4),
            batch: 2,
            ..Settings::of(arm, Size::Smallest)
        }
    }

    fn model(settings: Settings) -> (Model, Batch) {
        let device = Device::flex().autodiff();
        device.seed(5);
        let model = Model::new(&settings, &device);
        (model, settings.task().batch(2, 0, 0, &device))
    }

    #[test]
    fn controls_compute_what_the_layer_computes() {
        for sink in [false, true] {
            controls_compute_it(sink);
        }
    }

    fn controls_compute_it(sink: bool) {
        let settings = Settings {
            sink,
            ..settings(Arm::Unpruned)
        };
        let (model, batch) = model(settings);
        let layer = &model.blocks[0].attention;
        let tokens = EmbeddingConfig::new(model.settings.task().vocabulary(), 128)
            .init(&batch.tokens.device())
            .forward(batch.tokens.clone());
        let zeros = Tensor::zeros([2, 2, 64], &tokens.device());
        let theirs = layer.forward_with_scores(tokens.clone(), zeros);
        let ours = attend_to(layer, model.settings.sizes, (None, None), tokens).expect("it fits");
        let error: f32 = (ours - theirs).abs().max().into_scalar();
        assert!(error < 1e-6, "{error}");
    }

    #[test]
    fn scores_learn_by_kept_keys_if_those_are_left_out() {
        for leave_one_out in [None, Some(LeaveOneOut::default())] {
            let (model, batch) = model(Settings {
                runners_up: Some(0),
                leave_one_out,
                ..settings(Arm::NoRecent)
            });
            let loss = model.forward(&batch).expect("it fits").square().sum();
            let gradients = loss.backward();
            let Scorer::Linear(scorer) = model.blocks[0].attention.scorer() else {
                panic!("linear scores are the default");
            };
            let gradient = scorer.score_proj.val().grad(&gradients);
            let most = gradient.map(|gradient| gradient.abs().max().into_scalar::<f32>());
            assert_eq!(
                most.is_some_and(|most| most > 1e-6),
                leave_one_out.is_some(),
                "{most:?}"
            );
        }
    }

    #[test]
    fn scores_learn_in_the_arms_that_say_so() {
        for &arm in Arm::all() {
            let (model, batch) = model(settings(arm));
            let loss = model.forward(&batch).expect("it fits").square().sum();
            let gradients = loss.backward();
            let gradient = match model.blocks[0].attention.scorer() {
                Scorer::Linear(linear) => linear.score_proj.val().grad(&gradients),
                Scorer::Zoh(zoh) => zoh.dt_proj.val().grad(&gradients),
            };
            let learns = !matches!(arm.scores(), Scores::None | Scores::FrozenRank);
            assert_eq!(gradient.is_some(), learns, "{arm:?}");
        }
    }
}

//! A small transformer whose layers select their keys by an [`Arm`](crate::arm::Arm).
//!
//! ```text
//! tokens [B, N] ── embedding ── + the token before ── block × layers ── RMSNorm ── questions' rows ── linear ── answers
//! ```
//!
//! The previous token is added through a projection (a convolution of two taps), which binds a value to its key
//! before the first layer: the arms then differ in the keys they keep, not in whether a layer has learned to bind
//! pairs.

use super::keys::{Place, without_scores};
use super::task::{Batch, Text};
use crate::arm::Scores;
use crate::settings::{Settings, Sizes};
use burn::module::{Initializer, Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::DynamicMaskAttention;
use burn_flash_dma::train::embed;
use burn_flash_dma::{Attention, AttentionError, HeadEncoding, Intervals, linear, rms_norm};
use flash_dma_models::nn::{DecoderBlock, cast};

/// Maximum that a bounded score adds to a logit.
const BOUND: f32 = 4.0;

/// The model.
#[derive(Module, Debug)]
pub struct Model {
    embedding: Embedding,
    before: Linear,
    /// The blocks, whose attention layers the arms share.
    pub blocks: Vec<DecoderBlock>,
    norm: RmsNorm,
    answer: Linear,
    #[module(skip)]
    settings: Settings,
}

/// Keys that a layer attends to in a pass.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The selection; `None` for all keys.
    pub intervals: Option<Intervals>,
    /// Scores `[batch, kv_heads, len]` that made it; `None` for an arm without scores.
    pub scores: Option<Tensor<3>>,
}

impl Model {
    /// A model with random parameters: equal for arms with the same kind of scores, once they are
    /// [drawn](crate::train::drawn).
    pub fn new(settings: &Settings, device: &Device) -> Result<Self, AttentionError> {
        let (width, task) = (settings.sizes.width, settings.recall());
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let decoder = settings.decoder();
        let blocks = (1..=decoder.layers).map(|number| decoder.block(number).try_init(device));
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        Ok(Self {
            embedding: EmbeddingConfig::new(task.vocabulary(), width)
                .with_initializer(initializer)
                .init(device),
            before: linear(width, width),
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: RmsNormConfig::new(width).init(device),
            answer: linear(width, task.kinds),
            settings: settings.clone(),
        })
    }

    /// Sets the window from now on.
    pub fn set_window(&mut self, window: Option<usize>) {
        self.settings.window = window;
        if let Some(window) = window {
            let blocks = self.blocks.iter_mut();
            blocks.for_each(|block| block.attention.set_keep_window(window));
        }
    }

    /// The logits of the answers, `[batch * pairs, kinds]`.
    pub fn forward(&self, batch: &Batch) -> Result<Tensor<2>, AttentionError> {
        self.forward_seen(batch, |_, _, _| Ok(()))
    }

    /// The logits, and the keys of every layer.
    pub fn forward_and_seen(
        &self,
        batch: &Batch,
    ) -> Result<(Tensor<2>, Vec<Seen>), AttentionError> {
        let mut seen = Vec::new();
        let logits = self.forward_seen(batch, |number, layer, x| {
            let scores = match self.settings.arm.scores() {
                Scores::None => None,
                _ => Some(layer.try_scores(x.clone())?),
            };
            let intervals = self.keys(number, layer, x, &batch.texts)?;
            seen.push(Seen { intervals, scores });
            Ok(())
        })?;
        Ok((logits, seen))
    }

    /// The logits; `see` gets each layer's number, the layer and its input.
    fn forward_seen(
        &self,
        batch: &Batch,
        mut see: impl FnMut(usize, &DynamicMaskAttention, &Tensor<3>) -> Result<(), AttentionError>,
    ) -> Result<Tensor<2>, AttentionError> {
        let dtype = self.settings.dtype.burn();
        let x = embed(&self.embedding, batch.tokens.clone(), dtype);
        let [texts, len, width] = x.dims();
        let nothing = Tensor::zeros([texts, 1, width], (&x.device(), x.dtype()));
        let before = Tensor::cat(vec![nothing, x.clone().narrow(1, 0, len - 1)], 1);
        let mut x = x + linear(&cast(&self.before, dtype), before);
        for (number, block) in self.blocks.iter().enumerate() {
            x = cast(block, dtype).try_forward_with(x, |layer, x| {
                see(number, layer, &x)?;
                self.attend(number, layer, x, &batch.texts)
            })?;
        }
        let rows = x.reshape([texts * len, width]);
        let questions = rows.select(0, batch.rows.clone());
        let norm = cast(&self.norm, dtype);
        let questions = rms_norm(questions, norm.gamma.val(), norm.epsilon as f32);
        Ok(linear(&cast(&self.answer, dtype), questions))
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
            Scores::RankAndBias | Scores::Rank | Scores::FrozenRank => layer.try_forward(x),
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

    /// Selection of an arm that does not leave it to its layers.
    fn keys(
        &self,
        number: usize,
        layer: &DynamicMaskAttention,
        x: &Tensor<3>,
        texts: &[Text],
    ) -> Result<Option<Intervals>, AttentionError> {
        let [_, len, _] = x.dims();
        match self.settings.arm.scores() {
            Scores::None => {
                let place = Place {
                    layer: number,
                    kv_heads: self.settings.sizes.kv_heads,
                    window: self.settings.window.unwrap_or(len),
                    texts,
                };
                without_scores(self.settings.arm, place, len, &x.device())
            }
            _ => Ok(Some(layer.try_selection(x.clone())?)),
        }
    }
}

/// The part of a bounded score that is added to the logits.
fn bounded(scores: Tensor<3>) -> Tensor<3> {
    (scores / BOUND).tanh() * BOUND
}

/// Output of a layer with these keys and this addition to their logits; otherwise as the layer computes it, with its
/// own parameters.
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
        (Some(keys), Some(bias)) => with_sink(sink, attention.scores(bias).intervals(&keys))?,
        (Some(keys), None) => with_sink(sink, attention.intervals(&keys))?,
        (None, _) => with_sink(sink, attention)?,
    };
    let out = out.swap_dims(1, 2).reshape([batch, len, width]);
    Ok(linear(&layer.o_proj, out))
}

/// Output of an attention, with a sink logit per head if there are any.
fn with_sink<S>(
    sink: Option<Tensor<1>>,
    attention: Attention<S>,
) -> Result<Tensor<4>, AttentionError> {
    match sink {
        None => attention.try_forward(),
        Some(logits) => Ok(attention.try_forward_with_sink(logits)?.0),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::settings::{Size, Task};
    use burn_flash_dma::nn::Scorer;
    use clap::ValueEnum;

    fn settings(arm: Arm) -> Settings {
        Settings {
            window: arm.is_pruned().then_some(16),
            batch: 2,
            ..Settings::of(Task::Recall, arm, Size::Smallest)
        }
    }

    fn model(settings: Settings) -> (Model, Batch) {
        let device = Device::flex().autodiff();
        device.seed(5);
        let model = Model::new(&settings, &device).expect("it fits");
        (model, settings.recall().batch(2, 0, 0, &device))
    }

    #[test]
    fn controls_compute_what_the_layer_computes() {
        for sink in [false, true] {
            let mut settings = settings(Arm::Unpruned);
            settings.choice.sink = sink;
            let (model, batch) = model(settings);
            let layer = &model.blocks[0].attention;
            let tokens = model.embedding.forward(batch.tokens);
            let zeros = Tensor::zeros([2, 2, 64], &tokens.device());
            let theirs = layer.forward_with_scores(tokens.clone(), zeros);
            let ours = attend_to(layer, model.settings.sizes, (None, None), tokens);
            let error: f32 = (ours.expect("it fits") - theirs).abs().max().into_scalar();
            assert!(error < 1e-6, "{error}");
        }
    }

    #[test]
    fn scores_learn_by_kept_keys_if_those_are_left_out() {
        for kept in [false, true] {
            let mut settings = settings(Arm::NoRecent);
            settings.choice.runners_up = Some(0);
            settings.choice.without_kept = !kept;
            let (model, batch) = model(settings);
            let loss = model.forward(&batch).expect("it fits").square().sum();
            let gradients = loss.backward();
            let Scorer::Linear(scorer) = model.blocks[0].attention.scorer() else {
                panic!("linear scores are the default");
            };
            let gradient = scorer.score_proj.val().grad(&gradients);
            let most = gradient.map(|gradient| gradient.abs().max().into_scalar::<f32>());
            let learns = most.is_some_and(|most| most > 1e-6);
            assert_eq!(learns, kept, "{most:?}");
        }
    }

    #[test]
    fn scores_learn_in_the_arms_that_say_so() {
        for &arm in Arm::value_variants() {
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

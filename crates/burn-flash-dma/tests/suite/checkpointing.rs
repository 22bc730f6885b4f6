//! Checkpointed blocks against the same blocks without checkpointing.

use crate::case::{data, ints, random, refused, size, values, within};
use crate::layer::{self, Groups, WIDTH, parameters};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, RmsNorm, RmsNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Rope, Scores, Selection,
};
use burn_flash_dma::train::{Checkpointed, Selections, cross_entropy, embed};
use burn_flash_dma::{AttentionMask, Intervals};

const VOCABULARY: usize = 13;
const WINDOW: usize = 6;
const LEN: usize = 40;

#[derive(Module, Debug)]
struct Block {
    norm: RmsNorm,
    attention: DynamicMaskAttention,
}

impl Block {
    fn forward(&self, x: Tensor<3>, selections: &mut Selections) -> Tensor<3> {
        let normal = self.norm.forward(x.clone());
        x + selections.attend(&self.attention, normal)
    }
}

/// The embedding is used at both ends.
#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
}

fn layer(scores: Scores) -> DynamicMaskAttentionConfig {
    layer::config()
        .with_selection(Selection::keep(WINDOW).with_recent(Some(2)))
        .with_rope(Some(Rope::new(LEN)))
        .with_scores(scores)
}

impl Model {
    fn new(layer: &DynamicMaskAttentionConfig, blocks: usize) -> Self {
        let device = Device::flex().autodiff();
        let block = |_| Block {
            norm: RmsNormConfig::new(32).init(&device),
            attention: layer.init(&device),
        };
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 32).init(&device),
            blocks: (0..blocks).map(block).collect(),
            norm: RmsNormConfig::new(32).init(&device),
        }
    }

    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let weight = self.embedding.weight.val().transpose();
        let logits = self.norm.forward(x).matmul(weight.unsqueeze());
        cross_entropy(logits.flatten(0, 1), tokens().flatten(0, 1))
    }

    fn embed(&self) -> Tensor<3> {
        embed(&self.embedding, tokens(), FloatDType::F32)
    }
}

fn tokens() -> Tensor<2, Int> {
    let all = (0..2 * LEN as i32).map(|n| n * n % VOCABULARY as i32);
    Tensor::from_data(data(all, [2, LEN]), &Device::flex().autodiff())
}

fn ends(intervals: &Intervals) -> Vec<i64> {
    ints(intervals.tensor().clone())
}

#[test]
fn loss_gradients_and_selections_are_those_of_one_pass() {
    // Runners-up of linear scores are ranked by the second pass, optionally with kept keys that learn and ranks that
    // compete.
    for (scores, all) in [
        (Scores::Ranking, false),
        (Scores::Ranking, true),
        (Scores::Added, false),
        (Scores::Dma, false),
    ] {
        let layer = layer(scores).learning(|l| l.with_kept(all).with_compete(all));
        for blocks in [0, 1, 3] {
            let model = Model::new(&layer, blocks);
            let mut selections = Vec::new();
            let mut x = model.embed();
            for block in &model.blocks {
                let mut made = Selections::new();
                x = block.forward(x, &mut made);
                selections.extend(made.intervals().iter().map(ends));
            }
            let plain = model.loss(x);
            let gradients = GradientsParams::from_grads(plain.backward(), &model);
            let expected = parameters(&model, &gradients);

            let stack = Checkpointed::forward(&model.blocks, model.embed(), Block::forward);
            let again: Vec<_> = stack.selections().flatten().map(ends).collect();
            let what = format!("{scores:?} {all}");
            assert_eq!(again, selections, "{what}");
            let loss = model.loss(stack.output());
            let actual = parameters(&model, &stack.backward(&loss, &model));
            let [loss, plain] = [loss, plain].map(|loss| values(loss.without_autodiff()));
            assert_eq!(loss, plain, "{what}");
            assert_eq!(actual.len(), expected.len());
            for (actual, expected) in actual.into_iter().zip(expected) {
                let what = format!("{what}, {}", actual.name);
                let [actual, expected] = [actual, expected].map(|of| of.gradient.expect(&what));
                within(&actual, &expected, 1e-6 * size(&expected).max(1e-3), what);
            }
        }
    }
}

#[test]
fn a_loss_of_other_things_leaves_the_blocks_without_gradients() {
    let model = Model::new(&layer(Scores::Dma), 2);
    let stack = Checkpointed::forward(&model.blocks, model.embed(), Block::forward);
    let loss = model.norm.gamma.val().sum();
    let gradients = stack.backward(&loss, &model);
    assert_eq!(gradients.len(), 1);
}

#[test]
fn an_input_without_a_graph_ends_the_backward_pass() {
    let model = Model::new(&layer(Scores::Dma), 1);
    let x = random([2, LEN, WIDTH], &Device::flex().autodiff());
    let stack = Checkpointed::forward(&model.blocks, x, Block::forward);
    let loss = stack.output().powi_scalar(2).sum();
    let gradients = stack.backward(&loss, &model);
    let of = |id| gradients.get::<2>(id).is_some();
    assert!(of(model.blocks[0].attention.q_proj.weight.id) && !of(model.embedding.weight.id));
}

#[test]
fn a_layer_takes_the_selection_that_it_is_given() {
    let device = Device::flex().autodiff();
    let layer = layer(Scores::Ranking).init(&device);
    let [first, second] = [(); 2].map(|()| random([2, LEN, WIDTH], &device));
    let (out, intervals) = layer.forward_and_intervals(first.clone());
    assert_eq!(values(out.clone()), values(layer.forward(first.clone())));
    assert_eq!(ends(&intervals), ends(&layer.selection(first.clone())));
    let again = layer.forward_with_intervals(first, &intervals);
    assert_eq!(values(again), values(out));

    let other = layer.forward_with_intervals(second.clone(), &intervals);
    assert_ne!(values(other), values(layer.forward(second.clone())));
    let own = layer.forward_with_intervals(second.clone(), &layer.selection(second.clone()));
    assert_eq!(values(own), values(layer.forward(second)));
}

#[test]
fn selections_that_do_not_fit_are_refused() {
    let device = Device::flex().autodiff();
    let layer = layer(Scores::Dma).init(&device);
    let x = |len| Tensor::zeros([1, len, 32], &device);
    let (_, intervals) = layer.forward_and_intervals(x(20));
    let out = layer.try_forward_with_intervals(x(19), &intervals);
    refused(out, "Shape");
    let wider = layer.clone().with_keep_window(WINDOW + 1);
    let out = wider.try_forward_with_intervals(x(20), &intervals);
    refused(out, "IntervalsWindow");

    let pairs = AttentionMask::sliding_window([20, 20], 3, &device);
    let masked = DynamicMaskInput::new(x(20)).mask(pairs);
    refused(layer.try_forward_and_intervals(masked), "MaskedSelection");
}

#[test]
#[should_panic(expected = "the first pass called attention as often")]
fn a_second_pass_with_more_attention_is_refused() {
    let model = Model::new(&layer(Scores::Dma), 1);
    let calls = std::cell::Cell::new(0);
    let stack = Checkpointed::forward(&model.blocks, model.embed(), |block, x, selections| {
        calls.set(calls.get() + 1);
        let x = block.forward(x, selections);
        match calls.get() {
            1 => x,
            _ => block.forward(x, selections),
        }
    });
    let loss = model.loss(stack.output());
    let _ = stack.backward(&loss, &model);
}

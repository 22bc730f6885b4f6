//! From a transformer of Burn's own modules to one with dynamic-mask attention, as in the book.

// The same model twice is intended: only the line that imports the attention differs.
#![allow(clippy::duplicate_mod)]

mod sparse;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_dma::nn::{DynamicMaskCrossAttentionConfig, DynamicMaskInput};
use burn_flash_dma::train::AdamWConfig;
use dropped_in::model::{LENGTH, TOKENS};
use sparse::SparseModel;

/// The model with Burn's attention.
#[path = "your_model"]
mod plain {
    use burn::nn::attention;
    #[path = "model.rs"]
    pub mod model;
}

/// The model with this library's attention, from the same file.
#[path = "your_model"]
mod dropped_in {
    use burn_flash_dma::nn::mha as attention;
    #[path = "model.rs"]
    pub mod model;
}

pub fn main() {
    let device = Device::flex().autodiff();
    device.seed(4);
    let tokens = sequences(&device);

    let plain = plain::model::Model::new(&device);
    let expected = plain.forward(tokens.clone());
    // ANCHOR: record
    // A record of one model is a record of the other.
    let record = plain.into_record();
    let model = dropped_in::model::Model::new(&device).load_record(record);
    // ANCHOR_END: record
    let logits = model.forward(tokens.clone());
    let far = distance(logits, &expected);
    println!("drop-in: logits differ by {far:.0e} at most");

    let model = SparseModel::new(model, &device);
    let logits = model.forward(tokens.clone());
    let far = distance(logits, &expected);
    println!("a window of all keys: logits differ by {far:.0e} at most");

    let model = train(model, tokens, &device);
    groups(&model);
    adapters(model);
    decoder(&device);
}

/// `[8, LENGTH]`; every token determines the next.
fn sequences(device: &Device) -> Tensor<2, Int> {
    let range = Distribution::Uniform(0.0, TOKENS as f64);
    let mut column = Tensor::<2>::random([8, 1], range, device).int();
    let mut columns = Vec::new();
    for _ in 0..LENGTH {
        columns.push(column.clone());
        column = (column * 5 + 3).remainder_scalar(TOKENS as i32);
    }
    Tensor::cat(columns, 1)
}

/// The greatest difference.
fn distance(a: Tensor<3>, b: &Tensor<3>) -> f32 {
    (a - b.clone()).abs().max().into_scalar()
}

// ANCHOR: optimiser
/// AdamW with weight decay, but none for the parameters of the scores, for sinks, norms and biases.
fn optimiser() -> ModuleOptimizer {
    let undecayed = r"\.(bias|gamma|beta|score_proj|dt_proj|dt_bias|attention\.a|sink_logits)$";
    let undecayed = ParamGroup::from_regex(undecayed).expect("a regular expression");
    let without = AdamWConfig::new().with_weight_decay(0.0).build();
    let optimiser = AdamWConfig::new().with_weight_decay(0.1).init();
    optimiser.with_group(undecayed, without, None)
}
// ANCHOR_END: optimiser

fn train(mut model: SparseModel, tokens: Tensor<2, Int>, device: &Device) -> SparseModel {
    let inputs = tokens.clone().narrow(1, 0, LENGTH - 1);
    let targets: Tensor<1, Int> = tokens.narrow(1, 1, LENGTH - 1).flatten(0, 1);
    let criterion = CrossEntropyLossConfig::new().init(device);
    // ANCHOR: train
    let mut optimiser = optimiser();
    // First with every key, until the scores differ; then with fewer and fewer.
    for window in [LENGTH, 16, 8] {
        for block in &mut model.blocks {
            block.attention.set_keep_window(window);
        }
        let mut losses = Vec::new();
        for _ in 0..15 {
            let logits = model.forward(inputs.clone()).flatten(0, 1);
            let loss = criterion.forward(logits, targets.clone());
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimiser.step(1e-2, model, gradients);
        }
        println!("{window} keys: loss {:.2} to {:.2}", losses[0], losses[14]);
    }
    // ANCHOR_END: train
    model
}

/// Lists the parameters that decay: those that a step without gradients changes.
fn groups(model: &SparseModel) {
    let tokens = Tensor::<2, Int>::zeros([1, 4], &model.device());
    let loss = model.forward(tokens).sum() * 0.0;
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    let after = optimiser().step(1e-2, model.clone(), gradients);
    let [before, after] = [model, &after].map(Parameters::of);
    for (before, after) in before.found.iter().zip(&after.found) {
        if before.1 == after.1 {
            println!("not decayed: {}", before.0);
        }
    }
}

fn adapters(model: SparseModel) {
    // ANCHOR: adapters
    let attention = ParamGroup::from_regex(r"attention\.").expect("a regular expression");
    let model = model.apply_lora(Lora::new(4, 8.0).set_param_group(attention));
    // ANCHOR_END: adapters
    let trained = Parameters::of(&model).found;
    let trained = trained.iter().filter(|parameter| parameter.2);
    println!("adapters: {} matrices train", trained.count());
}

fn decoder(device: &Device) {
    let normal = Distribution::Normal(0.0, 1.0);
    let context = Tensor::<3>::random([2, 50, 64], normal, device);
    let steps = [0; 3].map(|_| Tensor::<3>::random([2, 1, 32], normal, device));
    // ANCHOR: cross
    let layer = DynamicMaskCrossAttentionConfig::new(32, 4)
        .with_d_context(Some(64))
        .with_window(Some(8))
        .init(device);
    // Contexts of 50 and 31 tokens, prepared once for all steps.
    let keys = layer.keys(DynamicMaskInput::new(context).lengths([50, 31]));
    let outputs = steps.map(|x| layer.forward_with_keys(x, &keys));
    // ANCHOR_END: cross
    let kept = keys.intervals().live_at(49).int().sum_dim(2);
    let [least, most] = [kept.clone().min(), kept.max()].map(Tensor::into_scalar::<i64>);
    let steps = outputs.len();
    println!("decoder: {steps} steps, each over {least} to {most} tokens");
}

/// Name, number of elements, and trainability of every parameter.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>, bool)>,
}

impl Parameters {
    fn of(model: &SparseModel) -> Self {
        let mut parameters = Self::default();
        model.visit(&mut parameters);
        parameters
    }
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let numbers = param.val().into_data().iter::<f32>().collect();
        let row = (self.path.join("."), numbers, param.is_require_grad());
        self.found.push(row);
    }
}

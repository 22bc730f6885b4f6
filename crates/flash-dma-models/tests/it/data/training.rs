//! Burn's training loop: its dashboard, and the loss of a batch.

use crate::data::loader::packed;
use crate::dir::Dir;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::metric::{Adaptor, LossInput, LossMetric, NumericEntry};
use burn::train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Selection,
};
use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric, embed, token_losses};
use flash_dma_models::data::{
    Batch, DeviceMemory, Loader, RowBatcher, TokenCount, TokensPerSecond,
};
use std::fs;
use std::sync::Arc;

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    attention: DynamicMaskAttention,
}

struct Output {
    loss: Tensor<1>,
    tokens: usize,
    selection: SelectionInput,
}

impl Model {
    fn new(device: &Device) -> Self {
        let attention = DynamicMaskAttentionConfig::new(16, 2).with_selection(Selection::keep(4));
        Self {
            embedding: EmbeddingConfig::new(50, 16).init(device),
            attention: attention.init(device),
        }
    }

    fn output(&self, batch: &Batch) -> Output {
        let x = embed(&self.embedding, batch.inputs.clone(), FloatDType::F32);
        let input = DynamicMaskInput::new(x).documents(batch.documents.clone());
        let selection = SelectionInput::new().layer(&self.attention, input.clone());
        let x = self.attention.forward(input).flatten::<2>(0, 1);
        let logits = x.matmul(self.embedding.weight.val().transpose());
        let losses = token_losses(logits, batch.targets.clone().flatten(0, 1));
        Output {
            loss: batch.mean(losses),
            tokens: batch.tokens(),
            selection,
        }
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> TrainOutput<Output> {
        let item = self.output(&batch);
        let grads = GradientsParams::from_grads(item.loss.backward(), self);
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> Output {
        self.output(&batch)
    }
}

impl ItemLazy for Output {
    fn sync(self) -> Result<Self, burn::tensor::ExecutionError> {
        Ok(Self {
            loss: self.loss.without_autodiff(),
            ..self
        })
    }
}

impl Adaptor<LossInput> for Output {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

impl Adaptor<TokenCount> for Output {
    fn adapt(&self) -> TokenCount {
        TokenCount(self.tokens)
    }
}

impl Adaptor<SelectionInput> for Output {
    fn adapt(&self) -> SelectionInput {
        self.selection.clone()
    }
}

#[test]
fn the_dashboard_shows_throughput_memory_and_the_selection() {
    let (data, logs) = (Dir::new(), Dir::new());
    let device = Device::flex();
    let rows = packed(&data);
    let train = Loader::new(rows.clone(), 3, 4, &device).unwrap();
    let valid = DataLoaderBuilder::new(RowBatcher)
        .batch_size(3)
        .set_device(device.clone());
    let autodiff = device.clone().autodiff();
    let training =
        SupervisedTraining::new(logs.path(""), Arc::new(train.clone()), valid.build(rows))
            .metric_train_numeric(LossMetric::new())
            .metric_train_numeric(TokensPerSecond::new())
            .metric_train_numeric(DeviceMemory::new(&device))
            .metric_valid_numeric(SelectionMetric::new(Measure::KeysAlive))
            .with_application_logger(None)
            .with_training_strategy(ExecutionStrategy::single(autodiff.clone()).into())
            .num_epochs(2);
    let learner = Learner::new(Model::new(&autodiff), AdamWConfig::new().init(), 0.01);
    let result = training.launch(learner);
    assert!(result.error.is_none(), "{:?}", result.error);

    let values = |split: &str, epoch: usize, name: &str| -> Vec<f64> {
        let log = logs.path(split).join(format!("epoch-{epoch}"));
        let log = fs::read_to_string(log.join(format!("{name}.log"))).unwrap_or_default();
        let entries = log.lines().map(NumericEntry::deserialize);
        let steps = entries.filter_map(Result::ok);
        let steps = steps.filter(|entry| matches!(entry, NumericEntry::Aggregated { .. }));
        steps.map(|entry| entry.current()).collect()
    };
    for epoch in [1, 2] {
        let steps = train.batches();
        assert_eq!(values("train", epoch, "Loss").len(), steps);
        // The first step starts the clock.
        let throughput = values("train", epoch, "Throughput");
        assert_eq!(throughput.len(), steps - 1);
        let mut rates = throughput.into_iter();
        assert!(rates.all(|rate| rate > 0.0 && rate.is_finite()));
        let alive = values("valid", epoch, "Keys_alive");
        // Including the smaller one.
        assert_eq!(alive.len(), steps + 1);
        assert!(alive.iter().all(|&keys| keys > 0.0 && keys <= 4.0));
        // Flex does not report its memory.
        assert!(values("train", epoch, "Device_memory").is_empty());
    }
    assert_eq!(train.state().step, 2 * train.batches());
}

#[test]
fn the_gradient_of_what_crosses_a_documents_end_is_0() {
    let dir = Dir::new();
    let device = Device::flex().autodiff();
    let loader = Loader::new(packed(&dir), 3, 4, &device).unwrap();
    let batch = loader.iter().next().unwrap().unwrap();
    let weights = batch.weights.clone().try_into_vec_as::<f32>().unwrap();
    let losses = Tensor::<1>::ones([weights.len()], &device).require_grad();
    let grads = batch.mean(losses.clone()).backward();
    let gradient = losses.grad(&grads).unwrap();
    let gradient = gradient.try_into_vec_as::<f32>().unwrap();
    let share = 1.0 / batch.predicted() as f32;
    assert!(weights.contains(&0.0) && weights.contains(&1.0));
    for (gradient, weight) in gradient.iter().zip(weights) {
        assert!((gradient - weight * share).abs() <= 1e-6 * share);
    }
}

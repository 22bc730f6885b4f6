//! Burn's training loop: epochs, slices, and what its dashboard shows.

use crate::loader::{Contents, contents};
use crate::support::{Dir, documents, write};
use burn::data::dataloader::DataLoader;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::metric::{Adaptor, LossInput, LossMetric, NumericEntry};
use burn::train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput};
use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric, embed, token_losses};
use flash_dma_models::data::{
    Batch, Batching, DeviceMemory, EpochLoader, Loader, PackedRows, Remainder, TokenCount,
    TokensPerSecond,
};
use std::fs;
use std::sync::Arc;

/// A loader of 25 rows of 8 tokens, the last of which is padded, in batches of three and a rest.
fn loader(dir: &Dir, device: &Device) -> Loader {
    let mut documents = documents(2, 100, 30, 50);
    let mut left: usize = 197;
    for document in &mut documents {
        document.truncate(left);
        left -= document.len();
    }
    let file = write(&dir.path("tokens"), &documents, 50);
    let rows = PackedRows::new(file, 8).unwrap();
    assert_eq!((rows.rows(), left), (25, 0));
    let batching = Batching::new(3).shuffled(4);
    Loader::new(rows, batching.with_remainder(Remainder::Smaller), device).unwrap()
}

fn all(batches: impl Iterator<Item = Batch>) -> Vec<Contents> {
    batches.map(contents).collect()
}

fn epoch(loader: &dyn DataLoader<Batch>) -> Vec<Contents> {
    all(loader.iter().map(Result::unwrap))
}

#[test]
fn epochs_are_those_of_the_loader() {
    let dir = Dir::new();
    let plain = loader(&dir, &Device::flex());
    let batches = plain.batches();
    let train = EpochLoader::new(plain.clone());
    assert_eq!(train.num_items(), plain.served());
    for number in 0..3 {
        assert_eq!(train.state().epoch, number);
        let expected = plain.clone().skip(number * batches).take(batches);
        assert_eq!(epoch(&train), all(expected.map(Result::unwrap)));
    }
}

#[test]
fn a_stopped_epoch_goes_on_where_it_stopped() {
    let dir = Dir::new();
    let plain = loader(&dir, &Device::flex());
    let train = EpochLoader::new(plain.clone());
    let (first, second) = (epoch(&train), epoch(&train));
    let stopped = EpochLoader::new(plain.clone());
    // What Burn gets is a copy for its device; the state is that of both.
    let burns = stopped.to_device(&Device::flex());
    epoch(&*burns);
    let mut iterator = burns.iter();
    assert_eq!(iterator.by_ref().take(4).count(), 4);
    assert_eq!(iterator.progress().items_processed, 12);
    drop(iterator);
    let state = stopped.state();
    assert_eq!((state.epoch, state.batch), (1, 4));
    let mut resumed = plain;
    resumed.resume(&state).unwrap();
    let resumed = EpochLoader::new(resumed);
    assert_eq!(epoch(&resumed), second[4..]);
    assert_eq!(resumed.state().epoch, 2);
    assert_ne!(first, second);
}

#[test]
fn an_epoch_is_done_at_its_end() {
    let dir = Dir::new();
    let train = EpochLoader::new(loader(&dir, &Device::flex()));
    let mut iterator = train.iter();
    let mut last = 0;
    while iterator.next().is_some() {
        let progress = iterator.progress();
        assert!(progress.items_processed > last);
        last = progress.items_processed;
    }
    assert!(iterator.next().is_none());
    assert!(iterator.progress().is_completed());
    assert_eq!(last, train.num_items());
}

#[test]
fn parts_are_the_epoch_in_pieces_and_any_of_them_may_be_the_first() {
    let dir = Dir::new();
    let plain = loader(&dir, &Device::flex());
    let whole = EpochLoader::new(plain.clone());
    let epochs: Vec<_> = (0..2).flat_map(|_| epoch(&whole)).collect();
    // Nine batches an epoch.
    for (parts, sizes) in [
        (1, vec![9]),
        (2, vec![4, 5]),
        (4, vec![2; 3]),
        (9, vec![1; 9]),
    ] {
        let train = EpochLoader::new(plain.clone()).with_parts(parts).unwrap();
        let mut served = Vec::new();
        for part in 0..2 * parts {
            let state = train.state();
            assert_eq!(state.epoch * 9 + state.batch, served.len());
            let later = EpochLoader::new(plain.clone()).with_parts(parts).unwrap();
            later.begin(part);
            assert_eq!(later.state(), state);
            let mut resumed = plain.clone();
            resumed.resume(&state).unwrap();
            let resumed = EpochLoader::new(resumed).with_parts(parts).unwrap();
            let batches = epoch(&train);
            assert_eq!(epoch(&later), batches);
            assert_eq!(epoch(&resumed), batches);
            if let Some(&size) = sizes.get(part) {
                assert_eq!(batches.len(), size);
            }
            served.extend(batches);
        }
        assert_eq!(served, epochs);
    }
    // A slice of two batches: of three parts one is empty.
    let train = EpochLoader::new(plain.clone()).with_parts(3).unwrap();
    let slice = train.slice(0, 6);
    let sizes = [0; 6].map(|_| epoch(&*slice).len());
    assert_eq!(sizes, [0, 1, 1, 0, 1, 1]);
    for parts in [0, 10] {
        let error = EpochLoader::new(plain.clone()).with_parts(parts);
        let error = error.expect_err("it is refused").to_string();
        assert_eq!(error, format!("{parts} parts of an epoch of 9 batches"));
    }
}

#[test]
fn slices_partition_every_epoch() {
    let dir = Dir::new();
    let train = EpochLoader::new(loader(&dir, &Device::flex()));
    let count = train.num_items();
    let slices = [(0, 7), (7, 7), (7, count)].map(|(start, end)| train.slice(start, end));
    for _ in 0..2 {
        let parts = slices.iter().flat_map(|slice| epoch(&**slice));
        let parts: Vec<_> = parts.flat_map(|batch| batch.0).collect();
        let whole: Vec<_> = epoch(&train).into_iter().flat_map(|b| b.0).collect();
        assert_eq!(parts, whole);
    }
    assert_eq!(slices[1].num_items(), 0);
    let again = slices[2].slice(0, 3);
    assert_eq!(epoch(&*again).len(), 1);
}

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
        let attention = DynamicMaskAttentionConfig::new(16, 2).with_keep_window(Some(4));
        Self {
            embedding: EmbeddingConfig::new(50, 16).init(device),
            attention: attention.init(device),
        }
    }

    fn loss(&self, batch: &Batch) -> (Tensor<1>, SelectionInput) {
        let x = embed(&self.embedding, batch.inputs.clone(), FloatDType::F32);
        let input = DynamicMaskInput::new(x).documents(batch.documents.clone());
        let selection = SelectionInput::new().layer(&self.attention, input.clone());
        let x = self.attention.forward(input).flatten::<2>(0, 1);
        let logits = x.matmul(self.embedding.weight.val().transpose());
        let losses = token_losses(logits, batch.targets.clone().flatten(0, 1));
        (batch.mean(losses), selection)
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> TrainOutput<Output> {
        let (loss, selection) = self.loss(&batch);
        let grads = GradientsParams::from_grads(loss.backward(), self);
        let item = Output {
            loss,
            tokens: batch.tokens(),
            selection,
        };
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> Output {
        let (loss, selection) = self.loss(&batch);
        Output {
            loss,
            tokens: batch.tokens(),
            selection,
        }
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
    let train = EpochLoader::new(loader(&data, &device));
    let plain = loader(&data, &device);
    let in_order = Batching::new(3).with_remainder(Remainder::Smaller);
    let valid = Loader::new(plain.rows().clone(), in_order, &device).unwrap();
    let valid = EpochLoader::new(valid);
    let autodiff = device.clone().autodiff();
    let training = SupervisedTraining::new(logs.path(""), Arc::new(train.clone()), Arc::new(valid))
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
        let values = entries.filter_map(|entry| match entry {
            Ok(NumericEntry::Aggregated {
                aggregated_value, ..
            }) => Some(aggregated_value),
            _ => None,
        });
        values.collect()
    };
    for epoch in [1, 2] {
        let steps = plain.batches();
        assert_eq!(values("train", epoch, "Loss").len(), steps);
        // The first step begins the clock.
        let throughput = values("train", epoch, "Throughput");
        assert_eq!(throughput.len(), steps - 1);
        assert!(
            throughput
                .iter()
                .all(|&rate| rate > 0.0 && rate.is_finite())
        );
        let alive = values("valid", epoch, "Keys_alive");
        assert_eq!(alive.len(), steps);
        assert!(alive.iter().all(|&keys| keys > 0.0 && keys <= 4.0));
        // Flex does not tell what it holds.
        assert!(values("train", epoch, "Device_memory").is_empty());
    }
    assert_eq!((train.state().epoch, train.state().batch), (2, 0));
}

#[test]
fn the_gradient_of_what_crosses_a_documents_end_is_0() {
    let dir = Dir::new();
    let device = Device::flex().autodiff();
    let batch = loader(&dir, &device).next().unwrap().unwrap();
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

//! Training of a checkpoint on packed documents, by burn-train: its adapters, or all of its parameters.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::Dataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Lora, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{Adaptor, LearningRateMetric, LossInput, LossMetric};
use burn::train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric, clip_gradients};
use flash_dma_models::data::{
    Batch, DeviceMemory, Loader, PackedRows, RowBatcher, TokenCount, TokensPerSecond,
};
use flash_dma_models::doge::Doge;
use flash_dma_models::nn::TokenInput;
use serde::Serialize;
use serde_json::json;

use crate::error::Error;
use crate::progress::Epochs;
use crate::resume;

/// burn-train's name of the metric that holds the loss.
pub const LOSS: &str = "Loss";

/// The gradients of all parameters together are clipped to this norm.
const MAX_NORM: f64 = 1.0;

/// The last checkpoints, which are kept. One of them may be incomplete.
const KEPT: usize = 2;

/// How much of a matrix a step takes away, in units of the learning rate.
const DECAY: f32 = 0.01;

/// The weights that adapters stand on unless others are named: every product of attention, of the scores and of the
/// feed-forward networks.
pub const TARGETS: &str = r"(q_proj|k_proj|v_proj|o_proj|gate|up|down)\.weight$|dt_proj$";

/// What is trained.
#[derive(Clone, Debug, Serialize)]
pub enum Tuning {
    /// Adapters of low rank on the weights whose paths a pattern finds.
    Lora {
        /// The inner dimension of the adapters.
        rank: usize,
        /// Their product counts `alpha / rank` times.
        alpha: f64,
        /// The regular expression.
        targets: String,
    },
    /// All parameters.
    Full,
}

/// How a model is trained.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// What is trained.
    pub tuning: Tuning,
    /// Rows of a step.
    pub batch: usize,
    /// Passes over the rows.
    pub epochs: usize,
    /// The parts of an epoch: after each the loss is measured, and a checkpoint is kept.
    pub parts: usize,
    /// The learning rate at first; it ends at a tenth of it.
    pub rate: f64,
    /// Seed of the order of the rows and of the adapters.
    pub seed: u64,
}

/// Where a training begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At its beginning. Earlier checkpoints are removed.
    Anew,
    /// Behind the last checkpoint, if there is one. It ends as if it had never stopped.
    Checkpoint,
}

/// The rows to train on, and those that it is measured on.
pub struct Rows {
    /// Shuffled anew in every epoch.
    pub train: PackedRows,
    /// Never trained on.
    pub valid: PackedRows,
}

/// A model that is trained.
#[derive(Module, Debug)]
pub struct Student {
    /// The model, with adapters if only these are trained.
    pub doge: Doge,
}

impl Student {
    // ANCHOR: lora
    /// A model that begins to learn, on a device with autodiff. New adapters change nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the rank is 0, or the pattern is no regular expression or finds no weight.
    pub fn new(doge: Doge, tuning: &Tuning) -> Result<Self, Error> {
        let (rank, alpha, targets) = match tuning {
            Tuning::Full => {
                let doge = doge.unfreeze();
                return Ok(Self { doge });
            }
            Tuning::Lora { rank: 0, .. } => {
                return Err(Error::Options("the rank must be at least 1".into()));
            }
            Tuning::Lora {
                rank,
                alpha,
                targets,
            } => (*rank, *alpha, targets),
        };
        let group = ParamGroup::from_regex(targets)
            .map_err(|error| Error::Options(format!("--targets: {error:?}")))?;
        let doge = doge.apply_lora(Lora::new(rank, alpha).set_param_group(group));
        let student = Self { doge };
        match student.trained() {
            0 => Err(Error::Options(format!("no weight is called {targets}"))),
            _ => Ok(student),
        }
    }

    /// The model as it was read, with what its adapters have learned added to its weights.
    #[must_use]
    pub fn merged(&self) -> Doge {
        self.doge.merged()
    }
    // ANCHOR_END: lora

    /// How many numbers are trained.
    #[must_use]
    pub fn trained(&self) -> usize {
        let mut trained = Trained::default();
        self.visit(&mut trained);
        trained.numbers
    }

    // ANCHOR: loss
    /// The loss of a batch: of every token that follows another of its own document. A token attends to its own
    /// document only.
    fn loss(&self, batch: &Batch) -> Tensor<1> {
        let input = TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone());
        let losses = self.doge.try_token_losses(input, batch.targets.clone());
        let losses = losses.expect("rows are no longer than the model reads");
        batch.mean(losses.flatten(0, 1))
    }
    // ANCHOR_END: loss
}

/// Counts what is trained.
#[derive(Default)]
struct Trained {
    numbers: usize,
    /// The paths of the parameters among them that are no matrices. Ids change when a model is read again.
    vectors: Vec<String>,
    path: Vec<String>,
}

impl ModuleVisitor for Trained {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        self.numbers += param.lazy_shape().num_elements();
        if D == 1 {
            self.vectors.push(self.path.join("."));
        }
    }
}

/// What the metrics of a step need.
pub struct Output {
    loss: Tensor<1>,
    tokens: usize,
    selections: SelectionInput,
}

impl ItemLazy for Output {
    fn sync(self) -> Result<Self, burn::tensor::ExecutionError> {
        // The metrics' thread reads the loss; it must neither wait for an idle queue nor hold the graph.
        self.loss.device().flush()?;
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
        self.selections.clone()
    }
}

impl TrainStep for Student {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> TrainOutput<Output> {
        let loss = self.loss(&batch);
        let mut grads = GradientsParams::from_grads(loss.backward(), self);
        clip_gradients(self, &mut grads, MAX_NORM);
        let item = Output {
            loss: loss.detach(),
            tokens: batch.tokens(),
            selections: SelectionInput::new(),
        };
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> Output {
        let loss = self.loss(&batch);
        // Selections are looked at in a pass of their own, as the loss of the borders between documents does not count.
        let input = TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone());
        let looked = self
            .doge
            .try_loss_and_selections(input, batch.targets.clone());
        let (_, selections) = looked.expect("rows are no longer than the model reads");
        Output {
            loss,
            tokens: batch.tokens(),
            selections,
        }
    }
}

// ANCHOR: optimiser
/// AdamW. Matrices decay, those of adapters too, towards the model that was read; norms, residual vectors, biases and
/// the `a` of the scores do not: zero is no neutral value of theirs.
fn optimiser(student: &Student) -> ModuleOptimizer {
    let mut trained = Trained::default();
    student.visit(&mut trained);
    let config = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
    let plain = config.clone().with_weight_decay(0.0).build();
    let vectors = ParamGroup::from_paths(trained.vectors);
    let decaying = config.with_weight_decay(DECAY).init();
    decaying.with_group(vectors, plain, None)
}
// ANCHOR_END: optimiser

/// The mean loss of rows, in the order of their file.
///
/// # Errors
///
/// [`Error::Data`] if the rows cannot be read.
pub fn loss_of(student: &Student, rows: &PackedRows, device: &Device) -> Result<f64, Error> {
    let student = student.valid();
    let plain = device.clone().without_autodiff();
    let (mut sum, mut count) = (0.0, 0);
    for row in 0..rows.len() {
        let batch = Batch::new(&[rows.row(row)?], &plain);
        let mean: f64 = f64::from(student.loss(&batch).into_scalar::<f32>());
        sum += mean * batch.predicted() as f64;
        count += batch.predicted();
    }
    Ok(sum / count.max(1) as f64)
}

/// Trains in `dir`, where checkpoints and Burn's logs go, and returns the model as it has become. In a terminal Burn's
/// dashboard shows the loss, the throughput, the memory and the selections; elsewhere there are plain lines.
///
/// # Errors
///
/// [`Error::Data`] if there is no whole batch or fewer batches than parts, [`Error::Settings`] if the training that is
/// to go on was another, [`Error::Io`] if old logs cannot be removed, [`Error::Training`] if Burn stopped.
pub fn train(
    student: Student,
    rows: &Rows,
    plan: &Plan,
    device: &Device,
    dir: &Path,
    start: Start,
) -> Result<Student, Error> {
    let plain = device.clone().without_autodiff();
    let train = Loader::new(rows.train.clone(), plan.batch, plan.seed, &plain)?;
    let valid = DataLoaderBuilder::new(RowBatcher)
        .batch_size(plan.batch)
        .set_device(plain.clone())
        .build(rows.valid.clone());
    let steps = train.batches() * plan.epochs;

    // ANCHOR: resume
    let settings = json!({
        "model": student.doge.config(), "activations": format!("{:?}", student.doge.dtype()),
        "plan": plan, "train": train.state(), "valid": rows.valid.tokens(),
    });
    let train = train.with_parts(plan.parts)?;
    let done = resume::begin(dir, &settings, start)?;
    train.begin(done.unwrap_or(0));
    // ANCHOR_END: resume
    // ANCHOR: metrics
    let mut training = SupervisedTraining::new(dir, Arc::new(train), valid)
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        .metric_train_numeric(TokensPerSecond::new())
        .metric_train_numeric(DeviceMemory::new(&plain))
        .metric_valid_numeric(SelectionMetric::new(Measure::KeysAlive))
        .metric_valid_numeric(SelectionMetric::new(Measure::Lifetime))
        // ANCHOR_END: metrics
        .with_default_checkpointers()
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(KEPT))
        .with_application_logger(None)
        .with_training_strategy(ExecutionStrategy::single(device.clone()).into())
        .num_epochs(plan.epochs * plan.parts);
    if let Some(done) = done {
        training = training.checkpoint(done);
    }
    if !std::io::stdout().is_terminal() {
        training = training.renderer(Box::new(Epochs::new(plan.parts)));
    }
    let optimiser = optimiser(&student);
    let result = training.launch(Learner::new(student, optimiser, schedule(plan, steps)));
    match result.error {
        Some(error) => Err(Error::Training(error.to_string())),
        None => Ok(result.model),
    }
}

/// A cosine down to a tenth.
fn schedule(plan: &Plan, steps: usize) -> ModuleLrScheduler {
    CosineAnnealingLrSchedulerConfig::new(plan.rate, steps.max(1))
        .with_min_lr(plan.rate / 10.0)
        .init()
        .expect("the rate is checked")
}

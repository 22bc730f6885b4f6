//! `doge fine-tune`: trains adapters, or all parameters, on packed documents with burn-train.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::Dataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Lora, ParamGroup};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::store::ModuleSnapshot;
use burn::tensor::FloatDType;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::{Adaptor, LearningRateMetric, LossInput, LossMetric};
use burn::train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flash_dma::train::{AdamWConfig, Measure, SelectionInput, SelectionMetric, optimize};
use clap::Parser;
use flash_dma_models::data::{
    Batch, DeviceMemory, Loader, PackedRows, RowBatcher, TextFormat, TokenCount, TokensPerSecond,
    write_tokens,
};
use flash_dma_models::doge::Doge;
use flash_dma_models::nn::TokenInput;
use flash_dma_models::{LanguageModel, RunFolder};
use serde_json::json;

use crate::{Error, Folder, Place, at};

/// Default weights for adapters: every product of attention, of the scores and of the feed-forward networks.
const TARGETS: &str = r"(q_proj|k_proj|v_proj|o_proj|gate|up|down)\.weight$|dt_proj$";

/// Trains on documents, and writes a model in the layout of the original.
///
/// Adapters of low rank (LoRA) are trained on the products of every block and added to the weights at the end; with
/// --full all parameters are trained. Documents are packed into rows of one length and do not see each other.
#[derive(Debug, Parser)]
pub struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// Documents: JSON lines if the name ends in `.jsonl`, or else plain text with empty lines between them.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// The field of a JSON line that holds the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Folder for the trained model; tokens, checkpoints and Burn's logs go into `training` below it.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Inner dimension of the adapters.
    #[arg(long, default_value_t = 8)]
    rank: usize,
    /// Scales the adapters by alpha / rank.
    #[arg(long, default_value_t = 16.0)]
    alpha: f64,
    /// Regular expression of the weights that get adapters.
    #[arg(long, value_name = "PATTERN", default_value = TARGETS)]
    targets: String,
    /// Train all parameters, without adapters.
    #[arg(long, conflicts_with_all = ["rank", "alpha", "targets"])]
    full: bool,
    /// Tokens of a row.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    length: usize,
    /// Rows of a step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Passes over the documents.
    #[arg(long, default_value_t = 1)]
    epochs: usize,
    /// Checkpoints per epoch. The loss on the held-out documents is measured before each.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    checkpoints: usize,
    /// Resume after the last checkpoint of --out, if there is one; all other options must be the same.
    #[arg(long)]
    resume: bool,
    /// Initial learning rate; a cosine reduces it to a tenth.
    #[arg(long, default_value_t = 1e-3)]
    rate: f64,
    /// Hold out one document in this many, the last ones, to measure the loss on.
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    keep_one_in: usize,
    /// Seed of the adapters and of the order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    place: Place,
}

/// Reads, trains, and writes.
pub fn run(cli: &Cli) -> Result<(), Error> {
    if [cli.batch, cli.epochs, cli.length, cli.checkpoints, cli.rank].contains(&0) {
        let reason = "--batch, --epochs, --length, --checkpoints and --rank must be at least 1";
        return Err(reason.into());
    }
    if cli.keep_one_in < 2 {
        return Err("--keep-one-in must be at least 2".into());
    }
    if !(cli.rate > 0.0 && cli.rate <= 1.0 && cli.alpha.is_finite()) {
        return Err("--rate must be above 0 and at most 1, --alpha a number".into());
    }
    let (device, dtype) = cli.place.open()?;
    let device = device.autodiff();
    device.seed(cli.seed);
    // ANCHOR: read
    // Parameters are f32 whatever the type of the activations: 16 bits would lose small steps.
    let folder = Folder::read(&cli.weights, FloatDType::F32, &device)?;
    let (train, valid) = rows(cli, &folder)?;
    let (student, trained) = Student::new(folder.model.with_dtype(dtype), cli)?;
    // ANCHOR_END: read
    let (rows, kept, length) = (train.len(), valid.len(), cli.length);
    print!("{rows} rows of {length} tokens to train on, {kept} to measure; ");
    println!("{trained} numbers are trained");
    println!("loss before {:.4}", loss_of(&student, &valid)?);
    let student = fit(cli, student, train, &valid, &device)?;
    println!("loss after {:.4}", loss_of(&student, &valid)?);
    // ANCHOR: write
    student.doge.merged().save_safetensors(&cli.out)?;
    // Files other than the model, which training does not change.
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        let from = cli.weights.join(name);
        if from.exists() {
            fs::copy(&from, cli.out.join(name)).map_err(at(&from))?;
        }
    }
    // ANCHOR_END: write
    println!("wrote {}", cli.out.display());
    Ok(())
}

/// Documents as rows to train on and, from the last documents, rows to evaluate.
fn rows(cli: &Cli, folder: &Folder) -> Result<(PackedRows, PackedRows), Error> {
    let limit = folder.model.config().max_position_embeddings;
    if cli.length > limit {
        return Err(format!("--length must be at most {limit}, which the model reads").into());
    }
    let lines = |path: &&PathBuf| path.extension().is_some_and(|end| end == "jsonl");
    let format = match cli.data.iter().filter(lines).count() {
        0 => TextFormat::Separated(String::new()),
        all if all == cli.data.len() => TextFormat::Jsonl {
            field: cli.field.clone(),
        },
        _ => return Err("--data has JSON lines and plain text: give one kind".into()),
    };
    let dir = cli.out.join("training");
    fs::create_dir_all(&dir).map_err(at(&dir))?;
    // ANCHOR: data
    let written = write_tokens(dir.join("tokens"), &cli.data, &format, &folder.vocabulary)?;
    let file = Arc::new(written.file);
    let documents = file.documents();
    let kept = documents.div_ceil(cli.keep_one_in).min(documents / 2);
    let rows = |of| PackedRows::of(file.clone(), of, cli.length);
    let (train, valid) = (0..documents - kept, documents - kept..documents);
    Ok((rows(train)?, rows(valid)?))
    // ANCHOR_END: data
}

/// A model in training, with adapters if only these are trained.
#[derive(Module, Debug)]
struct Student {
    doge: Doge,
}

impl Student {
    // ANCHOR: lora
    /// Prepares a model for training on a device with autodiff, and counts the trained numbers. New adapters change
    /// nothing.
    fn new(doge: Doge, cli: &Cli) -> Result<(Self, usize), Error> {
        let read = doge.num_params();
        if cli.full {
            let doge = doge.unfreeze();
            return Ok((Self { doge }, read));
        }
        let group = ParamGroup::from_regex(&cli.targets)
            .map_err(|error| format!("--targets: {error:?}"))?;
        let doge = doge.apply_lora(Lora::new(cli.rank, cli.alpha).set_param_group(group));
        // The original parameters are frozen below their adapters.
        match doge.num_params() - read {
            0 => Err(format!("no weight is called {}", cli.targets).into()),
            trained => Ok((Self { doge }, trained)),
        }
    }
    // ANCHOR_END: lora

    // ANCHOR: loss
    /// Loss of a batch, over every token that follows another of its own document. A token attends only to its own
    /// document.
    fn loss(&self, batch: &Batch) -> Tensor<1> {
        let input = TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone());
        let losses = self.doge.try_token_losses(input, batch.targets.clone());
        let losses = losses.expect("rows are no longer than the model reads");
        batch.mean(losses.flatten(0, 1))
    }
    // ANCHOR_END: loss
}

/// Input of a step's metrics.
struct Output {
    loss: Tensor<1>,
    tokens: usize,
    selections: SelectionInput,
}

impl ItemLazy for Output {
    fn sync(self) -> Result<Self, burn::tensor::ExecutionError> {
        // The metrics' thread reads the loss; it must neither wait for an idle queue nor hold the graph.
        self.loss.device().flush()?;
        let loss = self.loss.without_autodiff();
        Ok(Self { loss, ..self })
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

impl TrainStep for Student {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> TrainOutput<Output> {
        let loss = self.loss(&batch);
        let grads = GradientsParams::from_grads(loss.backward(), self);
        let item = Output {
            loss: loss.detach(),
            tokens: batch.tokens(),
            selections: SelectionInput::new(),
        };
        TrainOutput { grads, item }
    }

    /// With clipping, which belongs after a reduction over devices.
    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        optimize(optim, rate, self, grads, 1.0).0
    }
}

// ANCHOR: selections
impl Adaptor<SelectionInput> for Output {
    fn adapt(&self) -> SelectionInput {
        self.selections.clone()
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = Output;

    fn step(&self, batch: Batch) -> Output {
        let (loss, tokens) = (self.loss(&batch), batch.tokens());
        // Selections get a pass of their own, as the loss at the borders between documents does not count.
        let input = TokenInput::new(batch.inputs).documents(batch.documents);
        let looked = self.doge.try_loss_and_selections(input, batch.targets);
        let (_, selections) = looked.expect("rows are no longer than the model reads");
        Output {
            loss,
            tokens,
            selections,
        }
    }
}
// ANCHOR_END: selections

// ANCHOR: optimiser
/// AdamW. Matrices, also those of adapters, decay towards the original model; norms, residual vectors, biases and the
/// scores' `a` do not decay, as zero is not neutral for them.
fn optimiser(student: &Student) -> ModuleOptimizer {
    let config = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
    let plain = config.with_weight_decay(0.0).build();
    let tensors = student.collect(None, None, false).into_iter();
    let vectors = tensors.filter(|tensor| tensor.shape.num_dims() == 1);
    let vectors = ParamGroup::from_paths(vectors.map(|tensor| tensor.name).collect());
    let decaying = config.with_weight_decay(0.01).init();
    decaying.with_group(vectors, plain, None)
}
// ANCHOR_END: optimiser

/// The mean loss of rows.
fn loss_of(student: &Student, rows: &PackedRows) -> Result<f64, Error> {
    let student = student.valid();
    let (mut sum, mut count) = (0.0, 0);
    for row in 0..rows.len() {
        let batch = Batch::new(&[rows.row(row)?], &student.doge.device());
        let mean = student.loss(&batch).into_scalar::<f32>();
        sum += f64::from(mean) * batch.predicted() as f64;
        count += batch.predicted();
    }
    Ok(sum / count.max(1) as f64)
}

/// Trains. Burn shows the loss, the throughput, the memory and the selections.
fn fit(
    cli: &Cli,
    student: Student,
    train: PackedRows,
    valid: &PackedRows,
    device: &Device,
) -> Result<Student, Error> {
    let plain = device.clone().without_autodiff();
    // ANCHOR: resume
    let train = Loader::new(train, cli.batch, cli.seed, &plain)?;
    let (epochs, steps) = (cli.epochs * cli.checkpoints, cli.epochs * train.batches());
    // Everything that the training depends on.
    let settings = json!({
        "model": student.doge.config(), "activations": format!("{:?}", student.doge.dtype()),
        "adapters": (!cli.full).then(|| json!([cli.rank, cli.alpha, cli.targets])),
        "epochs": cli.epochs, "checkpoints": cli.checkpoints, "rate": cli.rate,
        "train": train.state(), "valid": valid.tokens(),
    });
    let train = train.with_parts(cli.checkpoints)?;
    let folder = RunFolder::new(cli.out.join("training"));
    let done = match cli.resume {
        true => folder.last(&settings, epochs)?,
        false => None,
    };
    if done.is_none() {
        folder.start_over(&settings)?;
    }
    train.begin(done.unwrap_or(0));
    // ANCHOR_END: resume
    let batches = DataLoaderBuilder::new(RowBatcher).batch_size(cli.batch);
    let batches = batches.set_device(plain.clone()).build(valid.clone());
    // ANCHOR: metrics
    let mut training = SupervisedTraining::new(folder.path(), Arc::new(train), batches)
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        .metric_train_numeric(TokensPerSecond::new())
        .metric_train_numeric(DeviceMemory::new(&plain))
        .metric_valid_numeric(SelectionMetric::new(Measure::KeysAlive))
        .metric_valid_numeric(SelectionMetric::new(Measure::Lifetime))
        // ANCHOR_END: metrics
        .summary()
        .with_default_checkpointers()
        // The last one may be incomplete.
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .with_application_logger(None)
        .with_training_strategy(ExecutionStrategy::single(device.clone()).into())
        .num_epochs(epochs);
    if let Some(done) = done {
        training = training.checkpoint(done);
    }
    let cosine =
        CosineAnnealingLrSchedulerConfig::new(cli.rate, steps).with_min_lr(cli.rate / 10.0);
    let optimiser = optimiser(&student);
    let result = training.launch(Learner::new(student, optimiser, cosine.init()?));
    match result.error {
        Some(error) => Err(format!("training stopped: {error}").into()),
        None => Ok(result.model),
    }
}

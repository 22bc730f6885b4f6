//! Training of a [`Decoder`] on text.

use crate::data::{
    Batch, DataError, Loader, LoaderState, PackedRows, Row, TokenFile, TokenFileWriter,
};
use crate::nn::{Decoder, DecoderConfig, TokenInput};
use crate::{Curriculum, LanguageModel};
use burn::config::Config;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::{Dataset, DatasetError};
use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::train::{AdamWConfig, optimize};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: usize = 256;

const MAX_NORM: f64 = 1.0;

const VALIDATED: usize = 64;

/// Training of a byte-level [`Decoder`] on text: AdamW, a learning rate that rises for a twentieth of the steps and
/// falls on a cosine to a tenth, optionally short texts first, and checkpoints.
///
/// ```no_run
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
/// use flash_dma_models::nn::DecoderConfig;
/// use flash_dma_models::TextTraining;
///
/// let attention = DynamicMaskAttentionConfig::new(128, 4)
///     .with_selection(Selection::keep(64))
///     .with_rope(Some(Rope::new(256)));
/// let training = TextTraining::new(DecoderConfig::new(attention, 4), 256);
/// let text = std::fs::read("book.txt").unwrap();
/// let model = training.try_run(&text, "runs/first", &Device::flex(), |at| println!("{at:?}"));
/// # }
/// ```
#[derive(Config, Debug)]
pub struct TextTraining {
    /// Configuration of the model.
    pub model: DecoderConfig,
    /// Bytes of a text.
    pub tokens: usize,
    /// Texts of a step; proportionally more of shorter ones.
    #[config(default = 8)]
    pub batch: usize,
    /// Training steps.
    #[config(default = 600)]
    pub steps: usize,
    /// Highest learning rate.
    #[config(default = 3e-3)]
    pub rate: f64,
    /// Share of the steps with shorter texts, in which layers that select their keys keep the same fraction of them.
    /// Default: none.
    #[config(default = "Curriculum::default()")]
    pub curriculum: Curriculum,
    /// Seed of the parameters and of the order of the texts.
    #[config(default = 0)]
    pub seed: u64,
    /// Number of validations, each followed by a checkpoint.
    #[config(default = 10)]
    pub evaluations: usize,
}

/// Losses at an evaluation, in nats per byte.
#[derive(Clone, Copy, Debug)]
pub struct Evaluated {
    /// Steps done.
    pub step: usize,
    /// Mean over the steps since the last evaluation.
    pub training_loss: f32,
    /// Mean over at most 64 texts that are not trained on.
    pub validation_loss: f64,
    /// Time since this call began.
    pub time: Duration,
}

/// Reason for a training to end early. The text of each error explains its fields.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum TrainingError {
    /// Error of the model or a step.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Error of the text or a file of the run.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A batch that cannot be read.
    #[error(transparent)]
    Batch(#[from] DatasetError),
    /// Error of a file of parameters or optimiser state.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Settings that cannot be trained with.
    #[error(
        "sizes and counts must be at least 1, the rate above 0 and at most 1, steps at least evaluations: {steps} \
         steps, {evaluations} evaluations, texts of {tokens} bytes, {batch} a step, rate {rate}"
    )]
    Settings {
        steps: usize,
        evaluations: usize,
        tokens: usize,
        batch: usize,
        rate: f64,
    },
    /// A text too short to train on and to validate with.
    #[error("{bytes} bytes are too few for texts of {tokens}: it takes {needed}")]
    TooShort {
        bytes: usize,
        tokens: usize,
        needed: usize,
    },
    /// A run to resume that does not exist.
    #[error("{}: no checkpoint", folder.display())]
    NoCheckpoint { folder: PathBuf },
    /// A run to resume that had other settings.
    #[error("the run was of {then}")]
    OtherRun { then: String },
}

impl TextTraining {
    /// Trains a model on a text. Checkpoints and tokens go to the folder, which loses those of an earlier run; `see`
    /// gets every evaluation. The text is cut into up to sixteen blocks, the last tenth of each being for validation.
    /// Returns the model without autodiff.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Settings`] or [`TrainingError::TooShort`], before anything is written; those of the model, of
    /// the data and of files.
    pub fn try_run(
        &self,
        text: &[u8],
        folder: impl AsRef<Path>,
        device: &Device,
        see: impl FnMut(&Evaluated),
    ) -> Result<Decoder, TrainingError> {
        let folder = folder.as_ref();
        let mut run = Run::new(self, text, folder, device)?;
        for (_, dir) in checkpoints(folder) {
            fs::remove_dir_all(&dir).map_err(DataError::io(&dir))?;
        }
        run.train(see)
    }

    /// Resumes a run from the last checkpoint in its folder: the model is that of an uninterrupted run.
    ///
    /// # Errors
    ///
    /// [`TrainingError::NoCheckpoint`], [`TrainingError::OtherRun`] if the settings differ, [`DataError::State`] if
    /// the text does, and those of [`try_run`](Self::try_run).
    pub fn try_resume(
        &self,
        text: &[u8],
        folder: impl AsRef<Path>,
        device: &Device,
        see: impl FnMut(&Evaluated),
    ) -> Result<Decoder, TrainingError> {
        let mut run = Run::new(self, text, folder.as_ref(), device)?;
        run.load()?;
        run.train(see)
    }

    fn check(&self) -> Result<(), TrainingError> {
        let sizes = [self.tokens, self.batch, self.evaluations, self.model.layers];
        let rate = self.rate > 0.0 && self.rate <= 1.0;
        match !sizes.contains(&0) && rate && self.steps >= self.evaluations {
            true => Ok(()),
            false => Err(TrainingError::Settings {
                steps: self.steps,
                evaluations: self.evaluations,
                tokens: self.tokens,
                batch: self.batch,
                rate: self.rate,
            }),
        }
    }

    fn rate_at(&self, step: usize) -> f64 {
        let warm_up = self.steps.div_ceil(20);
        if step < warm_up {
            return self.rate * (step + 1) as f64 / warm_up as f64;
        }
        let done = (step - warm_up) as f64 / (self.steps - warm_up) as f64;
        self.rate * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
    }

    /// Texts to train on and to validate with: no text crosses a block or a part of one.
    fn rows(&self, text: &[u8], folder: &Path) -> Result<[PackedRows; 2], TrainingError> {
        let (bytes, tokens) = (text.len(), self.tokens);
        let needed = 10 * (tokens + 1);
        if bytes < needed {
            return Err(TrainingError::TooShort {
                bytes,
                tokens,
                needed,
            });
        }
        // The validation text of a block has four rows, if the text is long enough.
        let blocks = (bytes / (4 * needed)).clamp(1, 16);
        let ends = |block: usize| (block * bytes / blocks, (block + 1) * bytes / blocks);
        let cut = |(start, end): (usize, usize)| end - (end - start) / 10;
        let train = (0..blocks).map(|block| ends(block).0..cut(ends(block)));
        let valid = (0..blocks).map(|block| cut(ends(block))..ends(block).1);
        fs::create_dir_all(folder).map_err(DataError::io(folder))?;
        let mut writer = TokenFileWriter::create(folder.join("tokens"), BYTES)?;
        for part in train.chain(valid) {
            let ids: Vec<u32> = text[part].iter().map(|&byte| byte.into()).collect();
            writer.push(&ids)?;
        }
        let file: Arc<TokenFile> = Arc::new(writer.finish()?);
        let of = |documents| PackedRows::of(file.clone(), documents, tokens);
        Ok([of(0..blocks)?, of(blocks..2 * blocks)?])
    }
}

struct Run<'a> {
    training: &'a TextTraining,
    folder: &'a Path,
    model: Decoder,
    optimiser: ModuleOptimizer,
    loader: Loader,
    valid: PackedRows,
}

impl<'a> Run<'a> {
    fn new(
        training: &'a TextTraining,
        text: &[u8],
        folder: &'a Path,
        device: &Device,
    ) -> Result<Self, TrainingError> {
        training.check()?;
        device.seed(training.seed);
        let model = training.model.try_init(&device.clone().autodiff())?;
        let [train, valid] = training.rows(text, folder)?;
        let optimiser = AdamWConfig::new()
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(0.01)
            .init();
        Ok(Self {
            training,
            folder,
            model,
            optimiser,
            loader: Loader::new(train, training.batch, training.seed, device)?,
            valid,
        })
    }

    fn train(&mut self, mut see: impl FnMut(&Evaluated)) -> Result<Decoder, TrainingError> {
        let training = self.training;
        let (tokens, steps) = (training.tokens, training.steps);
        let (done, start) = (self.loader.state().step, Instant::now());
        let evaluations = |step: usize| step * training.evaluations / steps;
        let mut epoch = self.loader.iter();
        let mut losses = Vec::new();
        for step in done..steps {
            let batch = match epoch.next() {
                Some(batch) => batch?,
                None => {
                    epoch = self.loader.iter();
                    epoch.next().expect("an epoch has a batch")?
                }
            };
            let divisor = training.curriculum.divisor(tokens, step, steps);
            let batch = batch.cut(divisor);
            self.model.try_set_share(divisor)?;
            let (input, weights) = (input(&batch), Some(batch.weights));
            let (loss, backward) =
                (self.model).try_loss_and_backward(input, batch.targets, weights)?;
            let (rate, model) = (training.rate_at(step), self.model.clone());
            let optimiser = &mut self.optimiser;
            (self.model, _) = optimize(optimiser, rate, model, backward(), MAX_NORM);
            // Read together: reading the loss of each step would make the device wait for the host.
            losses.push(loss.detach());
            if evaluations(step + 1) > evaluations(step) {
                let mean = Tensor::cat(std::mem::take(&mut losses), 0).mean();
                see(&Evaluated {
                    step: step + 1,
                    training_loss: mean.into_scalar::<f32>(),
                    validation_loss: self.validate()?,
                    time: start.elapsed(),
                });
                self.save()?;
            }
        }
        Ok(self.model.valid())
    }

    fn validate(&self) -> Result<f64, TrainingError> {
        let mut model = self.model.valid();
        model.try_set_share(1)?;
        let kept = self.valid.len().min(VALIDATED);
        let spread = |at: usize| self.valid.row(at * self.valid.len() / kept);
        let rows: Result<Vec<Row>, _> = (0..kept).map(spread).collect();
        let (mut sum, mut count) = (0.0, 0);
        for rows in rows?.chunks(self.training.batch) {
            let batch = Batch::new(rows, &model.device());
            let losses = model.try_token_losses(input(&batch), batch.targets.clone())?;
            let mean = batch.mean(losses.flatten(0, 1)).into_scalar::<f32>();
            sum += f64::from(mean) * batch.predicted() as f64;
            count += batch.predicted();
        }
        Ok(sum / count.max(1) as f64)
    }

    fn settings(&self) -> String {
        serde_json::to_string(self.training).expect("numbers and names")
    }

    /// Writes a checkpoint, which gets its name once it is complete, and removes all but the last two.
    fn save(&self) -> Result<(), TrainingError> {
        let (folder, state) = (self.folder, self.loader.state());
        let dir = folder.join("partial");
        fs::create_dir_all(&dir).map_err(DataError::io(&dir))?;
        let record = self.model.clone().into_record();
        record.save(dir.join("model.bpk"))?;
        self.optimiser.to_record().save(dir.join("optimiser.bpk"))?;
        let path = dir.join("state.json");
        let saved = serde_json::to_string(&(self.settings(), &state)).expect("numbers and names");
        fs::write(&path, saved).map_err(DataError::io(&path))?;
        let whole = folder.join(format!("checkpoint-{}", state.step));
        fs::rename(&dir, whole).map_err(DataError::io(&dir))?;
        let mut found = checkpoints(folder);
        found.truncate(found.len().saturating_sub(2));
        for (_, dir) in found {
            fs::remove_dir_all(&dir).map_err(DataError::io(&dir))?;
        }
        Ok(())
    }

    fn load(&mut self) -> Result<(), TrainingError> {
        let folder = self.folder.to_path_buf();
        let last = checkpoints(&folder).pop();
        let (_, dir) = last.ok_or(TrainingError::NoCheckpoint { folder })?;
        let path = dir.join("state.json");
        let saved = fs::read_to_string(&path).map_err(DataError::io(&path))?;
        let saved: Result<(String, LoaderState), _> = serde_json::from_str(&saved);
        let of_json = |error: serde_json::Error| DataError::io(&path)(error.into());
        let (then, state) = saved.map_err(of_json)?;
        if then != self.settings() {
            return Err(TrainingError::OtherRun { then });
        }
        self.loader.resume(&state)?;
        let record = ModuleRecord::load(dir.join("model.bpk"))?;
        self.model = self.model.clone().try_load_record(record)?;
        let record = OptimizerRecord::load(dir.join("optimiser.bpk"))?;
        self.optimiser = self.optimiser.clone().load_record(record);
        Ok(())
    }
}

/// Input of the model: no byte sees another block of the text.
fn input(batch: &Batch) -> TokenInput {
    TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone())
}

fn checkpoints(folder: &Path) -> Vec<(usize, PathBuf)> {
    let step = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let step = name.strip_prefix("checkpoint-")?.parse().ok()?;
        Some((step, entry.path()))
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.filter_map(step).collect();
    found.sort();
    found
}

//! Training of a [`Decoder`] on text.

mod config;
mod folder;
mod report;
mod student;

pub use config::{Evaluated, Reading, TextTraining};
pub use folder::{FolderError, RunFolder};

use crate::data::{
    DataError, Loader, LoaderState, PackedRows, RowBatcher, TokenFile, TokenFileWriter,
};
use crate::nn::Decoder;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::Dataset;
use burn::data::dataset::transform::SelectionDataset;
use burn::tensor::Device;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::{Learner, SupervisedTraining};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::DynamicMaskAttention;
use burn_flash_dma::train::{AdamWConfig, DeviceGroup, data_parallel};
use report::{Quiet, Reports, Schedule};
use serde_json::json;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use student::{Student, Texts};

const BYTES: usize = 256;

const VALIDATED: usize = 64;

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
    /// Error of Burn's loop: a batch that cannot be read, a checkpoint, a device.
    #[error(transparent)]
    Loop(#[from] Arc<burn::train::TrainingError>),
    /// No device, or more of them than share the texts of a step evenly.
    #[error("{devices} devices cannot share the {batch} texts of a step evenly")]
    Devices { devices: usize, batch: usize },
    /// More devices than bytes of the shortest text, of which each has a part.
    #[error("{devices} devices cannot share a text of {tokens} bytes")]
    Parts { devices: usize, tokens: usize },
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
    /// A folder that cannot be used, or belongs to a run with other settings.
    #[error(transparent)]
    Folder(#[from] FolderError),
}

impl TextTraining {
    /// Trains a model on a text. Checkpoints and tokens go to the folder, which loses those of an earlier run; `see`
    /// gets every evaluation. The text is cut into up to sixteen blocks, the last tenth of each being for validation.
    /// Returns the model, on the first device, without autodiff.
    ///
    /// Several devices [share the texts of a step](data_parallel). The result is that of a single device, up to
    /// rounding.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Settings`], [`TrainingError::Devices`] or [`TrainingError::TooShort`], before anything is
    /// written; those of the model, of the data and of files.
    ///
    /// # Panics
    ///
    /// If a device fails.
    pub fn try_run(
        &self,
        text: &[u8],
        folder: impl AsRef<Path>,
        devices: &[Device],
        see: impl FnMut(&Evaluated),
    ) -> Result<Decoder, TrainingError> {
        let run = Run::new(self, text, folder.as_ref(), devices)?;
        run.folder.start_over(&run.settings())?;
        run.train(0, see)
    }

    /// Resumes a run from the last whole checkpoint in its folder. With one device the model is that of an uninterrupted
    /// run; the number of devices may be another one.
    ///
    /// # Errors
    ///
    /// [`TrainingError::NoCheckpoint`], [`FolderError::OtherSetting`] if the settings or the text differ, and those of
    /// [`try_run`](Self::try_run).
    ///
    /// # Panics
    ///
    /// If a device fails.
    pub fn try_resume(
        &self,
        text: &[u8],
        folder: impl AsRef<Path>,
        devices: &[Device],
        see: impl FnMut(&Evaluated),
    ) -> Result<Decoder, TrainingError> {
        let folder = folder.as_ref();
        let run = Run::new(self, text, folder, devices)?;
        let last = run.folder.last(&run.settings(), self.evaluations)?;
        let none = || TrainingError::NoCheckpoint {
            folder: folder.into(),
        };
        run.train(last.ok_or_else(none)?, see)
    }

    fn check(&self, devices: usize) -> Result<(), TrainingError> {
        let part = match self.reading {
            Reading::InParts(part) => part,
            Reading::Whole | Reading::OverDevices => 1,
        };
        let sizes = [
            self.tokens,
            self.batch,
            self.evaluations,
            self.model.layers,
            part,
        ];
        let rate = self.rate > 0.0 && self.rate <= 1.0;
        let batch = self.batch;
        if sizes.contains(&0) || !rate || self.steps < self.evaluations {
            return Err(TrainingError::Settings {
                steps: self.steps,
                evaluations: self.evaluations,
                tokens: self.tokens,
                batch,
                rate: self.rate,
            });
        }
        let tokens = self.tokens / self.divisor(0);
        match self.reading {
            Reading::OverDevices if devices > tokens => {
                Err(TrainingError::Parts { devices, tokens })
            }
            Reading::OverDevices if devices > 0 => Ok(()),
            _ if batch.is_multiple_of(devices) => Ok(()),
            _ => Err(TrainingError::Devices { devices, batch }),
        }
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

/// A training of some epochs of Burn's, each of which ends with an evaluation and a checkpoint.
struct Run<'a> {
    training: Arc<TextTraining>,
    folder: RunFolder,
    devices: &'a [Device],
    /// Of the devices, if each reads a part of every text.
    group: Option<DeviceGroup>,
    model: Decoder,
    loader: Loader,
    valid: PackedRows,
}

impl<'a> Run<'a> {
    fn new(
        training: &TextTraining,
        text: &[u8],
        folder: &Path,
        devices: &'a [Device],
    ) -> Result<Self, TrainingError> {
        training.check(devices.len())?;
        for device in devices {
            device.seed(training.seed);
        }
        let device = &devices[0];
        let model = training.model.try_init(&device.clone().autodiff())?;
        if training.reading != Reading::Whole {
            let mut layers = model.blocks.iter().map(|block| &block.attention);
            layers.try_for_each(DynamicMaskAttention::check_in_parts)?;
        }
        let group = match training.reading {
            Reading::OverDevices => Some(DeviceGroup::try_new(devices)?),
            Reading::Whole | Reading::InParts(_) => None,
        };
        // The shortest texts have the smallest windows.
        model.clone().try_set_share(training.divisor(0))?;
        let [train, valid] = training.rows(text, folder)?;
        let loader = Loader::new(train, training.batch, training.seed, device)?;
        Ok(Self {
            training: Arc::new(training.clone()),
            folder: RunFolder::new(folder),
            devices,
            group,
            model,
            loader,
            valid,
        })
    }

    /// Everything that the parameters depend on, except for the devices.
    fn settings(&self) -> serde_json::Value {
        let state = LoaderState {
            step: 0,
            ..self.loader.state()
        };
        let mut settings = json!(*self.training);
        settings["text"] = json!(state);
        settings
    }

    /// Trains after an evaluation, counted from 1, whose checkpoint the model begins with; 0 is the beginning.
    fn train(self, done: usize, mut see: impl FnMut(&Evaluated)) -> Result<Decoder, TrainingError> {
        let (reports, evaluated) = Reports::new(self.training.clone(), done);
        thread::scope(|scope| {
            let burns = scope.spawn(|| self.fit(done, reports));
            while !burns.is_finished() {
                if let Ok(at) = evaluated.recv_timeout(Duration::from_millis(20)) {
                    see(&at);
                }
            }
            evaluated.try_iter().for_each(|at| see(&at));
            burns.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Burn's loop, in which an epoch ends with an evaluation.
    fn fit(self, done: usize, reports: Reports) -> Result<Decoder, TrainingError> {
        let training = self.training;
        let step = training.end(done);
        let state = self.loader.state();
        self.loader.resume(&LoaderState { step, ..state })?;
        let kept = self.valid.len().min(VALIDATED);
        let spread = (0..kept).map(|at| at * self.valid.len() / kept).collect();
        let valid = DataLoaderBuilder::new(RowBatcher)
            .batch_size(training.batch)
            .build(SelectionDataset::from_indices_checked(self.valid, spread));
        let optimiser = AdamWConfig::new()
            .with_beta_2(0.95)
            .with_epsilon(1e-8)
            .with_weight_decay(0.01);
        let rates = Schedule::new(training.clone(), step);
        let learner = Learner::new(Student::new(self.model), optimiser.init(), rates);
        let devices = match &self.group {
            // Its others are the group's.
            Some(_) => &self.devices[..1],
            None => self.devices,
        };
        let group = self.group.map(|group| Arc::new(Mutex::new(group)));
        let texts = Texts::new(training.clone(), Arc::new(self.loader), group, step);
        let devices = devices.iter().map(|device| device.clone().autodiff());
        let strategy = data_parallel(&devices.collect::<Vec<_>>());
        let mut burns = SupervisedTraining::new(self.folder.path(), Arc::new(texts), valid)
            .metric_train(reports.of_training())
            .metric_valid(reports)
            .renderer(Box::new(Quiet))
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_application_logger(None)
            .with_default_checkpointers()
            // The last one may be incomplete.
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
            .with_training_strategy(strategy.into())
            .num_epochs(training.evaluations);
        if done > 0 {
            burns = burns.checkpoint(done);
        }
        let result = burns.launch(learner);
        match result.error {
            Some(error) => Err(error.into()),
            None => Ok(result.model.into_decoder()),
        }
    }
}

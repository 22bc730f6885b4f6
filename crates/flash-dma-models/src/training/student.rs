//! The model, and the texts of its steps, for Burn's loop.

use super::config::{Reading, TextTraining};
use super::report::Loss;
use crate::data::Batch;
use crate::nn::{Decoder, TokenInput, expect};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::module::Module;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_flash_dma::train::{DeviceGroup, optimize};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const MAX_NORM: f64 = 1.0;

/// A model in training.
#[derive(Module, Debug)]
pub(super) struct Student {
    decoder: Decoder,
}

impl Student {
    pub fn new(decoder: Decoder) -> Self {
        Self { decoder }
    }

    pub fn into_decoder(self) -> Decoder {
        self.decoder
    }
}

/// Input of the model: no byte sees another block of the text.
fn input(batch: &Batch) -> TokenInput {
    TokenInput::new(batch.inputs.clone()).documents(batch.documents.clone())
}

impl TrainStep for Student {
    type Input = Step;
    type Output = Loss;

    fn step(&self, step: Step) -> TrainOutput<Loss> {
        let (batch, mut decoder) = (step.batch, self.decoder.clone());
        expect(decoder.try_set_share(step.divisor));
        let (input, weights) = (input(&batch), Some(batch.weights_of_mean()));
        let targets = batch.targets;
        let (loss, grads) = match (step.reading, step.group) {
            (Reading::InParts(part), _) => {
                expect(decoder.try_loss_and_gradients_in_parts(input, targets, weights, part))
            }
            (Reading::OverDevices, group) => {
                let group = group.expect("a group of the devices");
                let mut group = group.lock().unwrap_or_else(PoisonError::into_inner);
                expect(decoder.try_loss_and_gradients_over(&mut group, input, targets, weights))
            }
            (Reading::Whole, _) => {
                let loss = decoder.try_loss_and_backward(input, targets, weights);
                let (loss, backward) = expect(loss);
                (loss, backward())
            }
        };
        let item = Loss::new(loss, 1);
        TrainOutput { grads, item }
    }

    /// With clipping, which belongs after the devices' sum.
    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        optimize(optim, rate, self, grads, MAX_NORM).0
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        let losses = self
            .decoder
            .try_token_losses(input(&batch), batch.targets.clone());
        let losses = expect(losses).flatten(0, 1);
        Loss::new(batch.mean(losses), batch.predicted())
    }
}

/// Texts of a step.
pub(super) struct Step {
    batch: Batch,
    /// How many times shorter they are than those of the last step.
    divisor: usize,
    reading: Reading,
    group: Option<Group>,
}

/// Devices of which each reads a part of every text.
type Group = Arc<Mutex<DeviceGroup>>;

/// Texts of all steps; an iterator has those up to the next evaluation.
#[derive(Clone)]
pub(super) struct Texts {
    training: Arc<TextTraining>,
    batches: Arc<dyn DataLoader<Batch>>,
    group: Option<Group>,
    /// Steps served.
    step: Arc<AtomicUsize>,
}

impl Texts {
    /// The texts after `step` steps, as the batches are.
    pub fn new(
        training: Arc<TextTraining>,
        batches: Arc<dyn DataLoader<Batch>>,
        group: Option<Group>,
        step: usize,
    ) -> Self {
        Self {
            training,
            batches,
            group,
            step: Arc::new(AtomicUsize::new(step)),
        }
    }

    fn step(&self) -> usize {
        self.step.load(Ordering::Relaxed)
    }
}

impl DataLoader<Step> for Texts {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Step> + 'a> {
        let (training, first) = (&self.training, self.step());
        let ends = (1..=training.evaluations).map(|evaluation| training.end(evaluation));
        let end = ends.into_iter().find(|&end| end > first);
        Box::new(Steps {
            texts: self,
            epoch: self.batches.iter(),
            first,
            end: end.unwrap_or(first),
        })
    }

    fn num_items(&self) -> usize {
        self.batches.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Step>> {
        Arc::new(Self {
            batches: self.batches.to_device(device),
            ..self.clone()
        })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Step>> {
        let batches = self.batches.slice(start, end);
        let (training, group) = (self.training.clone(), self.group.clone());
        Arc::new(Self::new(training, batches, group, self.step()))
    }
}

struct Steps<'a> {
    texts: &'a Texts,
    epoch: Box<dyn DataLoaderIterator<Batch> + 'a>,
    first: usize,
    end: usize,
}

impl Iterator for Steps<'_> {
    type Item = Result<Step, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (texts, step) = (self.texts, self.texts.step());
        if step >= self.end {
            return None;
        }
        let next = self.epoch.next().or_else(|| {
            self.epoch = texts.batches.iter();
            self.epoch.next()
        });
        Some(next?.map(|batch| {
            texts.step.store(step + 1, Ordering::Relaxed);
            let divisor = texts.training.divisor(step);
            Step {
                batch: batch.cut(divisor),
                divisor,
                reading: texts.training.reading,
                group: texts.group.clone(),
            }
        }))
    }
}

impl DataLoaderIterator<Step> for Steps<'_> {
    fn progress(&self) -> Progress {
        let steps = self.end - self.first;
        Progress::new(self.texts.step() - self.first, steps, Some("steps".into()))
    }
}

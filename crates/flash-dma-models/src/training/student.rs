//! The model, and the texts of its steps, for Burn's loop.

use super::config::TextTraining;
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
use burn_flash_dma::train::optimize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
        let (loss, grads) = match step.part {
            Some(part) => {
                expect(decoder.try_loss_and_gradients_in_parts(input, batch.targets, weights, part))
            }
            None => {
                let loss = decoder.try_loss_and_backward(input, batch.targets, weights);
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
    /// Bytes of a part, if they are read in parts.
    part: Option<usize>,
}

/// Texts of all steps; an iterator has those up to the next evaluation.
#[derive(Clone)]
pub(super) struct Texts {
    training: Arc<TextTraining>,
    batches: Arc<dyn DataLoader<Batch>>,
    /// Steps served.
    step: Arc<AtomicUsize>,
}

impl Texts {
    /// The texts after `step` steps, as the batches are.
    pub fn new(
        training: Arc<TextTraining>,
        batches: Arc<dyn DataLoader<Batch>>,
        step: usize,
    ) -> Self {
        Self {
            training,
            batches,
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
        Arc::new(Self::new(self.training.clone(), batches, self.step()))
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
            let TextTraining {
                tokens,
                steps,
                part,
                ..
            } = *texts.training;
            let divisor = texts.training.curriculum.divisor(tokens, step, steps);
            Step {
                batch: batch.cut(divisor),
                divisor,
                part,
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

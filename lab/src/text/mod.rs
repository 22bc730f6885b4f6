//! Language models on running text, with or without facts: the loss from pruning their attention.

pub mod answers;
pub mod corpus;
pub mod losses;
pub mod needles;
pub mod windows;

use crate::Result;
use crate::layers::LayerStatistics;
use crate::settings::{Settings, Task};
use crate::train::{Evaluation, Subject, Watched, finite, scalar};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use corpus::Corpus;
use flash_dma_models::nn::{Decoder, DecoderBlock};
use losses::WindowLosses;
use needles::Needles;
use windows::Windows;

/// Texts of a step.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Bytes read, `[batch, tokens]`.
    pub inputs: Tensor<2, Int>,
    /// The byte after each of them, `[batch, tokens]`.
    pub targets: Tensor<2, Int>,
    /// 1 where the target is part of an answer, else 0, `[batch, tokens]`; `None` without answers.
    pub answers: Option<Tensor<2>>,
}

impl Batch {
    /// Texts of equal length without answers; the last byte of each is only a target.
    pub fn new(texts: &[&[u8]], device: &Device) -> Self {
        let tokens = texts[0].len() - 1;
        Self {
            inputs: bytes(texts.iter().map(|text| &text[..tokens]), device),
            targets: bytes(texts.iter().map(|text| &text[1..]), device),
            answers: None,
        }
    }
}

/// Texts of equal length as a tensor, `[texts, len]`.
pub fn bytes<'a>(texts: impl Iterator<Item = &'a [u8]>, device: &Device) -> Tensor<2, Int> {
    let (mut numbers, mut count) = (Vec::new(), 0);
    for text in texts {
        count += 1;
        numbers.extend(text.iter().map(|&byte| i32::from(byte)));
    }
    let shape = [count, numbers.len() / count.max(1)];
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// Texts for training and evaluation.
#[derive(Debug)]
enum Material<'a> {
    Text(Windows<'a>),
    Needles(Needles<'a>),
}

/// A run of text or needles.
#[derive(Debug)]
pub struct Language<'a> {
    settings: &'a Settings,
    material: Material<'a>,
    validation: Vec<Batch>,
    device: Device,
}

impl<'a> Language<'a> {
    /// The run of the settings.
    pub fn new(corpus: &'a Corpus, settings: &'a Settings, device: &Device) -> Result<Self> {
        let (tokens, factor) = (settings.tokens, settings.task.longest());
        let windows = |most| Windows::new(corpus, tokens, factor, most);
        let material = match settings.task {
            Task::Needles => Material::Needles(Needles::new(windows(usize::MAX)?, tokens)),
            _ => Material::Text(windows(settings.texts)?),
        };
        let validation = match &material {
            Material::Text(windows) => windows.validation(settings.batch, device),
            Material::Needles(needles) => needles.validation(settings.batch, device),
        };
        Ok(Self {
            settings,
            material,
            validation,
            device: device.clone(),
        })
    }
}

/// A new model with the same parameters (identity included, for the optimiser) and another window: recent keys depend
/// on the window, and are all of it in a sliding layer.
pub fn with_window(model: Decoder, settings: &Settings, window: Option<usize>) -> Result<Decoder> {
    let settings = Settings {
        window,
        ..settings.clone()
    };
    let device = model.embedding.weight.val().device();
    let other = settings.decoder().try_init(&device)?;
    Ok(other.load_record(model.into_record()))
}

impl Subject for Language<'_> {
    type Model = Decoder;

    fn model(&self, device: &Device) -> Result<Decoder> {
        Ok(self.settings.decoder().try_init(device)?)
    }

    fn with_window(&self, model: Decoder, window: Option<usize>) -> Result<Decoder> {
        with_window(model, self.settings, window)
    }

    fn blocks(model: &Decoder) -> &[DecoderBlock] {
        &model.blocks
    }

    fn gradients(&self, model: &Decoder, step: usize) -> Result<(Tensor<1>, GradientsParams)> {
        let (settings, trained) = (self.settings, self.settings.step(step));
        let (seed, size) = (settings.seed, trained.batch);
        let batch = match &self.material {
            Material::Text(windows) => {
                let texts = [step * size, size, settings.tokens / trained.divisor];
                windows.batch(seed, texts, &self.device)
            }
            Material::Needles(needles) => needles.batch(seed, [step * size, size], &self.device),
        };
        let weights = batch.answers.map(|answers| {
            let weights = answers * (settings.answer_weight - 1.0) + 1.0;
            let mean = weights.clone().mean().reshape([1, 1]);
            (weights / mean).autodiff()
        });
        let (inputs, targets) = (batch.inputs.autodiff(), batch.targets.autodiff());
        let (loss, backward) = model.try_loss_and_backward(inputs, targets, weights)?;
        Ok((loss, backward()))
    }

    /// Mean loss of all bytes and of the answers' bytes.
    fn watch(&self, model: &Decoder) -> Result<Watched> {
        let texts = |batch: &Batch| batch.inputs.dims()[0] as f64;
        let all: f64 = self.validation.iter().map(texts).sum();
        let (mut mean, mut of_answers) = (0.0, None);
        for batch in &self.validation {
            let share = texts(batch) / all;
            let losses = model.try_token_losses(batch.inputs.clone(), batch.targets.clone())?;
            mean += share * scalar(losses.clone().mean());
            if let Some(answers) = &batch.answers {
                let loss = scalar((losses * answers.clone()).sum() / answers.clone().sum());
                of_answers = Some(of_answers.unwrap_or(0.0) + share * loss);
            }
        }
        Ok(Watched {
            validation_loss: Some(finite(mean, "validation loss")?),
            answer_loss: of_answers,
            ..Watched::default()
        })
    }

    fn evaluate(&self, model: &Decoder) -> Result<Evaluation> {
        let (settings, device) = (self.settings, &self.device);
        let first = self.validation[0].inputs.clone().narrow(0, 0, 1);
        let by_layer = model.try_selections(first)?.into_iter();
        let statistics = |(intervals, scores)| LayerStatistics::of(&intervals, Some(&scores));
        let mut evaluation = Evaluation {
            by_layer: by_layer.map(|layer| layer.map(statistics)).collect(),
            ..Evaluation::default()
        };
        match &self.material {
            Material::Text(windows) => {
                let (short, long) = (windows.short(), windows.long());
                // As many bytes at a time.
                let fewer = settings.batch / settings.task.longest();
                evaluation.losses = vec![
                    losses::evaluate(model, &short, settings.batch, device)?,
                    losses::evaluate(model, &long, fewer, device)?,
                ];
                for &window in &settings.choice.other_windows {
                    let model = with_window(model.clone(), settings, Some(window))?;
                    let losses = losses::evaluate(&model, &short, settings.batch, device)?;
                    let losses = WindowLosses { window, losses };
                    evaluation.losses_by_window.push(losses);
                }
            }
            Material::Needles(needles) => {
                evaluation.answers = Some(answers::ask(model, needles, settings, device)?);
            }
        }
        Ok(evaluation)
    }
}

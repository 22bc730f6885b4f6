//! One run: the training, then the evaluation of what it has made.

use crate::answers::ask;
use crate::losses::evaluate;
use crate::needles::Needles;
use crate::rows::{Outcome, WindowLosses};
use crate::selection::statistics;
use crate::settings::{Settings, Task};
use crate::train::{Lessons, Point, train, with_window};
use crate::windows::Windows;
use burn::tensor::Device;
use train_text::data::Corpus;
use train_text::error::Error;
use train_text::model::TextModel;

/// What a task's models are trained and evaluated on.
pub enum Material {
    /// Of [`Task::Text`].
    Text(Windows),
    /// Of [`Task::Needles`].
    Needles(Needles),
}

impl Material {
    /// The material of a run, and of every other one of the same task, length and number of texts.
    ///
    /// # Errors
    ///
    /// [`Error::TinyCorpus`] if the corpus is too short for the longest texts.
    pub fn new(corpus: Corpus, settings: &Settings) -> Result<Self, Error> {
        let (tokens, factor) = (settings.tokens, settings.task.longest());
        Ok(match settings.task {
            Task::Text => Self::Text(Windows::new(corpus, tokens, factor, settings.texts)?),
            Task::Needles => {
                let windows = Windows::new(corpus, tokens, factor, usize::MAX)?;
                Self::Needles(Needles::new(windows, tokens))
            }
        })
    }

    /// Trains and evaluates a model. `see` gets the points of its curve.
    ///
    /// # Errors
    ///
    /// [`Error`] if a loss is not finite or the device fails.
    pub fn run(
        &self,
        settings: &Settings,
        device: &Device,
        see: impl FnMut(&Point),
    ) -> Result<(TextModel, Outcome), Error> {
        match self {
            Self::Text(windows) => {
                let (model, training) = train(settings, windows, device, see)?;
                let (short, long) = (windows.short(), windows.long());
                // As many bytes at a time.
                let fewer = settings.batch / settings.task.longest();
                let losses = vec![
                    evaluate(&model, &short, settings.batch, device)?,
                    evaluate(&model, &long, fewer, device)?,
                ];
                let by_layer = selected(&model, windows, device)?;
                let by_window = settings.other_windows.iter().map(|&window| {
                    let model = with_window(model.clone(), settings, Some(window), device);
                    let losses = evaluate(&model, &short, settings.batch, device)?;
                    Ok(WindowLosses { window, losses })
                });
                let outcome = Outcome {
                    by_layer,
                    training,
                    losses,
                    losses_by_window: by_window.collect::<Result<_, Error>>()?,
                    answers: None,
                };
                Ok((model, outcome))
            }
            Self::Needles(needles) => {
                let (model, training) = train(settings, needles, device, see)?;
                let outcome = Outcome {
                    by_layer: selected(&model, needles, device)?,
                    training,
                    losses: Vec::new(),
                    losses_by_window: Vec::new(),
                    answers: Some(ask(&model, needles, settings, device)?),
                };
                Ok((model, outcome))
            }
        }
    }
}

/// What the layers select on a text of validation.
fn selected(
    model: &TextModel,
    lessons: &impl Lessons,
    device: &Device,
) -> Result<Vec<Option<crate::selection::LayerStatistics>>, Error> {
    let texts = lessons.validation(1, device).swap_remove(0).inputs;
    Ok(statistics(model, texts)?)
}

//! Multi-query associative recall: the task, the keys of the controls, a small model, and its evaluation.

pub mod evaluate;
pub mod keys;
pub mod model;
pub mod task;

use crate::Result;
use crate::settings::Settings;
use crate::train::{Evaluation, Subject, Watched};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::train::cross_entropy;
use flash_dma_models::nn::DecoderBlock;
use model::Model;
use task::Batch;

/// A run of recall.
#[derive(Debug)]
pub struct Recall<'a> {
    settings: &'a Settings,
    evaluated: Batch,
    device: Device,
}

impl<'a> Recall<'a> {
    /// The run of the settings.
    pub fn new(settings: &'a Settings, device: &Device) -> Self {
        Self {
            settings,
            evaluated: evaluate::texts(settings, device),
            device: device.clone().autodiff(),
        }
    }
}

impl Subject for Recall<'_> {
    type Model = Model;

    fn model(&self, device: &Device) -> Result<Model> {
        Ok(Model::new(self.settings, device)?)
    }

    fn with_window(&self, mut model: Model, window: Option<usize>) -> Result<Model> {
        model.set_window(window);
        Ok(model)
    }

    fn blocks(model: &Model) -> &[DecoderBlock] {
        &model.blocks
    }

    fn gradients(&self, model: &Model, step: usize) -> Result<(Tensor<1>, GradientsParams)> {
        let trained = self.settings.step(step);
        let task = self.settings.recall().shortened(trained.divisor);
        let batch = task.batch(trained.batch, self.settings.seed, step, &self.device);
        let loss = cross_entropy(model.forward(&batch)?, batch.answers);
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        Ok((loss, gradients))
    }

    fn watch(&self, model: &Model) -> Result<Watched> {
        let seen = self.evaluate(model)?;
        let layers = seen.by_layer.into_iter().flatten();
        Ok(Watched {
            accuracy: seen.accuracy,
            kept: seen.kept,
            spreads: layers.filter_map(|layer| layer.spread).collect(),
            ..Watched::default()
        })
    }

    fn evaluate(&self, model: &Model) -> Result<Evaluation> {
        Ok(evaluate::evaluate(model, &self.evaluated)?)
    }
}

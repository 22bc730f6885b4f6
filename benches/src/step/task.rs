//! A training task: the interface, and that of the whole decoder.

use super::Options;
use crate::Result;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::train::DeviceGroup;
use flash_dma_models::nn::{Activations, Backward, Decoder, DecoderConfig};
use flash_dma_reference::Rng;
use std::num::NonZeroUsize;

/// A module and its training data.
pub trait Task {
    /// The trained module.
    type Module: Module;

    /// The module with its initial parameters.
    fn init(&self, device: &Device) -> Self::Module;

    /// The loss of the next batch, and its backward pass.
    fn forward<'a>(&mut self, module: &'a Self::Module) -> (Tensor<1>, Backward<'a>);
}

/// The devices of which each reads a part of every sequence.
pub fn group(options: &Options) -> Result<Option<DeviceGroup>> {
    let Some(count) = options.devices else {
        return Ok(None);
    };
    let devices = (0..count.get()).map(|number| options.model.place.numbered(number));
    let group = DeviceGroup::try_new(&devices.collect::<Result<Vec<_>>>()?)?;
    Ok(Some(group))
}

/// The language model on random bytes.
pub struct ModelTask {
    config: DecoderConfig,
    rng: Rng,
    shape: [usize; 2],
    part: Option<NonZeroUsize>,
    group: Option<DeviceGroup>,
    device: Device,
}

impl ModelTask {
    /// The model of the options.
    pub fn new(options: &Options, device: &Device) -> Result<Self> {
        let model = &options.model;
        let activations = match options.checkpoint {
            true => Activations::Recomputed,
            false => Activations::Kept,
        };
        let config = model.decoder(options.seq).with_activations(activations);
        Ok(Self {
            config: config.with_vocabulary(options.vocabulary),
            rng: Rng::new(7),
            shape: [model.batch, options.seq],
            part: options.part,
            group: group(options)?,
            device: device.clone(),
        })
    }
}

impl Task for ModelTask {
    type Module = Decoder;

    fn init(&self, device: &Device) -> Decoder {
        self.config.init(device)
    }

    fn forward<'a>(&mut self, model: &'a Decoder) -> (Tensor<1>, Backward<'a>) {
        // Random: the next one is unpredictable.
        let vocabulary = self.config.vocabulary as u128;
        let mut tokens = || -> Tensor<2, Int> {
            let any = |_| ((u128::from(self.rng.next_u64()) * vocabulary) >> 64) as i32;
            let tokens = (0..self.shape.iter().product()).map(any);
            Tensor::from_data(TensorData::new(tokens.collect(), self.shape), &self.device)
        };
        let (inputs, targets) = (tokens(), tokens());
        let all = match (self.part, &mut self.group) {
            (None, None) => {
                let loss = model.try_loss_and_backward(inputs, targets, None);
                return loss.expect("windows fit the model");
            }
            (Some(part), _) => {
                model.try_loss_and_gradients_in_parts(inputs, targets, None, part.get())
            }
            (None, Some(group)) => model.try_loss_and_gradients_over(group, inputs, targets, None),
        };
        let (loss, gradients) = all.expect("layers have windows");
        (loss, Box::new(move || gradients))
    }
}

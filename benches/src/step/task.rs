//! Training tasks: the decoder, or only its attention layer.

use super::Options;
use crate::Result;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::train::DeviceGroup;
use flash_dma_models::nn::{Activations, Backward, Decoder, DecoderConfig, cast};
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
        let group = options.devices.map(|count| -> Result<DeviceGroup> {
            let devices = (0..count.get()).map(|number| model.place.numbered(number));
            Ok(DeviceGroup::try_new(&devices.collect::<Result<Vec<_>>>()?)?)
        });
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
            group: group.transpose()?,
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

/// One attention layer on a random input, which gets a gradient as within a model.
pub struct LayerTask {
    config: DynamicMaskAttentionConfig,
    dtype: FloatDType,
    input: Tensor<3>,
    /// Gradient of the output.
    slope: Tensor<3>,
}

impl LayerTask {
    /// The layer of the options.
    pub fn new(options: &Options, device: &Device) -> Self {
        let model = &options.model;
        let dtype = model.place.dtype.burn();
        let normal = || {
            let shape = [model.batch, options.seq, model.d_model];
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<3>::random(shape, normal, device).cast(dtype)
        };
        Self {
            config: model.attention(options.seq),
            dtype,
            input: normal(),
            slope: normal(),
        }
    }
}

impl Task for LayerTask {
    type Module = DynamicMaskAttention;

    fn init(&self, device: &Device) -> DynamicMaskAttention {
        self.config.init(device)
    }

    fn forward<'a>(&mut self, layer: &'a DynamicMaskAttention) -> (Tensor<1>, Backward<'a>) {
        let copy = cast(layer, self.dtype);
        let out = copy.forward(self.input.clone().autodiff().require_grad());
        // A mean keeps the loss finite in 16 bits.
        let loss = (out * self.slope.clone().autodiff()).mean();
        let kept = loss.clone();
        let backward = move || GradientsParams::from_grads(kept.backward(), layer);
        (loss, Box::new(backward))
    }
}

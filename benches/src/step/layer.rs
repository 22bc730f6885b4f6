//! Training of one attention layer, by one device or by several of which each reads a part of every sequence.

use super::Options;
use super::task::{Task, group};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::train::{DeviceGroup, PartLayers, Parts, StepInParts, send};
use flash_dma_models::nn::{Backward, cast};
use std::ops::Range;
use std::slice;

/// One attention layer on a random input, which gets a gradient as within a model.
pub struct LayerTask {
    config: DynamicMaskAttentionConfig,
    step: LayerStep,
    group: Option<DeviceGroup>,
}

impl LayerTask {
    /// The layer of the options.
    pub fn new(options: &Options, device: &Device) -> crate::Result<Self> {
        let model = &options.model;
        let dtype = model.place.dtype.burn();
        let normal = || {
            let shape = [model.batch, options.seq, model.d_model];
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<3>::random(shape, normal, device).cast(dtype)
        };
        let tensors = [normal(), normal()];
        let group = group(options)?;
        // Each device has its own copy, as it has the output of the layer before in a model.
        let devices = group.iter().flat_map(DeviceGroup::devices);
        let copies = devices.map(|device| tensors.clone().map(|tensor| send(tensor, device)));
        Ok(Self {
            config: model.attention(options.seq),
            step: LayerStep {
                dtype,
                copies: copies.collect(),
                tensors,
            },
            group,
        })
    }
}

impl Task for LayerTask {
    type Module = DynamicMaskAttention;

    fn init(&self, device: &Device) -> DynamicMaskAttention {
        self.config.init(device)
    }

    fn forward<'a>(&mut self, layer: &'a DynamicMaskAttention) -> (Tensor<1>, Backward<'a>) {
        let [batch, len, _] = self.step.tensors[0].dims();
        if let Some(group) = &mut self.group {
            let parts = Parts::even(batch, len, group.devices().len());
            let (loss, gradients) = group
                .try_gradients(&layer.without_rotary_table(), &parts, &self.step)
                .expect("the layer has a window");
            return (loss, Box::new(move || gradients));
        }
        let copy = cast(layer, self.step.dtype);
        let [input, slope] = self.step.tensors.clone();
        let out = copy.forward(input.autodiff().require_grad());
        // A mean keeps the loss finite in 16 bits.
        let loss = (out * slope.autodiff()).mean();
        let kept = loss.clone();
        let backward = move || GradientsParams::from_grads(kept.backward(), layer);
        (loss, Box::new(backward))
    }
}

/// Input and gradient of the output of an attention layer.
#[derive(Clone)]
struct LayerStep {
    dtype: FloatDType,
    tensors: [Tensor<3>; 2],
    /// The same on each device of a group.
    copies: Vec<[Tensor<3>; 2]>,
}

impl StepInParts<DynamicMaskAttention> for LayerStep {
    type Block = DynamicMaskAttention;

    fn to_device(&self, device: &Device) -> Self {
        let there = |copy: &&[Tensor<3>; 2]| copy[0].device() == *device;
        let copy = self.copies.iter().find(there);
        Self {
            tensors: copy.expect("a device of the group").clone(),
            copies: Vec::new(),
            ..*self
        }
    }

    fn input(
        &self,
        _: &DynamicMaskAttention,
        tokens: Range<usize>,
    ) -> Result<Tensor<3>, AttentionError> {
        let input = self.tensors[0].clone();
        Ok(input.narrow(1, tokens.start, tokens.len()).autodiff())
    }

    fn blocks<'a>(&self, layer: &'a DynamicMaskAttention) -> &'a [DynamicMaskAttention] {
        slice::from_ref(layer)
    }

    fn block(
        &self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        layers.try_attend(&cast(layer, self.dtype), x)
    }

    fn loss(
        &self,
        _: &DynamicMaskAttention,
        tokens: Range<usize>,
        out: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError> {
        let [_, len, _] = self.tensors[1].dims();
        let slope = self.tensors[1].clone();
        let slope = slope.narrow(1, tokens.start, tokens.len()).autodiff();
        let share = tokens.len() as f64 / len as f64;
        Ok((out * slope).mean() * share)
    }
}

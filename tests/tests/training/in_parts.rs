//! A sequence in parts, one after the other and each on a device, through Burn: the gradients of two layers are those of a pass over
//! the whole sequence.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
use burn_flash_dma::train::{DeviceGroup, PartLayers, Parts, StepInParts, send, try_in_parts};
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, load, values};
use std::ops::Range;

every_burn!(gradients_of_the_whole);

#[derive(Module, Debug)]
pub struct Layers {
    pub all: Vec<DynamicMaskAttention>,
}

/// Gradients of all parameters, empty where there is none.
struct All<'a> {
    gradients: &'a GradientsParams,
    found: Vec<Vec<f64>>,
}

impl ModuleVisitor for All<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        self.found.push(gradient.map(values).unwrap_or_default());
    }
}

fn all(layers: &Layers, gradients: &GradientsParams) -> Vec<Vec<f64>> {
    let found = Vec::new();
    let mut all = All { gradients, found };
    layers.visit(&mut all);
    all.found
}

fn gradients_of_the_whole<B: Backend>(burn: &Burn<B>) {
    // Each length of a part is compiled for, which takes CubeCL's processor runtime long.
    let (len, window, part, types) = match B::SIZE {
        Size::Large => (700, 96, 353, &[F32, Bf16][..]),
        _ => (40, 12, 15, &[F32][..]),
    };
    let device = burn.device().clone().autodiff();
    let config = DynamicMaskAttentionConfig::new(64, 4)
        .with_n_kv_heads(Some(2))
        .with_selection(Selection::keep(window).with_sinks(1));
    device.seed(3);
    let layers = Layers {
        all: vec![config.init(&device), config.init(&device)],
    };
    for &element in types {
        let rng = &mut Rng::new(17);
        let mut random = || -> Tensor<3> {
            let numbers: Vec<f64> = (0..2 * len * 64).map(|_| rng.normal()).collect();
            load(&numbers, [2, len, 64], element, &device)
        };
        let (x, slope) = (random(), random());
        let forward = |layers: &Layers| {
            let each = layers.all.iter();
            each.fold(x.clone(), |x, layer| x.clone() + layer.forward(x))
        };
        let whole = loss(forward(&layers), slope.clone());
        let of_whole = GradientsParams::from_grads(whole.backward(), &layers);
        let of_whole = all(&layers, &of_whole);
        // A short last part.
        let parts = Parts::new(2, len, part);
        let in_parts = try_in_parts(
            &layers,
            &parts,
            |layers: &Layers, tokens, parts| {
                let mut each = layers.all.iter();
                each.try_fold(of(&x, tokens), |x, layer| {
                    Ok(x.clone() + parts.try_attend(layer, x)?)
                })
            },
            |_, tokens, out| Ok(loss(out, of(&slope, tokens))),
        );
        let (_, in_parts) = in_parts.expect("it fits");
        assert_same(&of_whole, &all(&layers, &in_parts), element);
        let devices = vec![burn.device().clone(); len.div_ceil(part)];
        let mut group = DeviceGroup::try_new(&devices).expect("one device, several times");
        let step = Step {
            x: x.without_autodiff(),
            slope: slope.without_autodiff(),
        };
        let over = group.try_gradients(&layers, &parts, &step);
        let (_, over) = over.expect("it fits");
        assert_same(&of_whole, &all(&layers, &over), element);
    }
}

fn assert_same(whole: &[Vec<f64>], parts: &[Vec<f64>], element: ElementType) {
    for (whole, parts) in whole.iter().zip(parts) {
        assert_eq!(whole.len(), parts.len());
        let most = whole.iter().fold(0f64, |most, x| most.max(x.abs()));
        let far = whole.iter().zip(parts).map(|(a, b)| (a - b).abs());
        let far = far.fold(0f64, f64::max);
        // Products of f32 may round to TF32; in 16 bits a key's gradient is rounded once for each part.
        let grain = match element {
            F32 => 2e-3,
            _ => 3e-2,
        };
        assert!(far <= grain * most, "{element:?}: {far} of {most}");
    }
}

fn of(all: &Tensor<3>, tokens: Range<usize>) -> Tensor<3> {
    all.clone().narrow(1, tokens.start, tokens.len())
}

fn loss(out: Tensor<3>, slope: Tensor<3>) -> Tensor<1> {
    // In f32: the loss is a sum of many terms.
    (out.cast(dtype(F32)) * slope.cast(dtype(F32))).sum()
}

/// Input of the first layer, and the gradient of the last one's output.
#[derive(Clone)]
pub struct Step {
    pub x: Tensor<3>,
    pub slope: Tensor<3>,
}

impl StepInParts<Layers> for Step {
    type Block = DynamicMaskAttention;

    fn to_device(&self, device: &Device) -> Self {
        let Self { x, slope } = self.clone();
        Self {
            x: send(x, device),
            slope: send(slope, device),
        }
    }

    fn input(&self, _: &Layers, tokens: Range<usize>) -> Result<Tensor<3>, AttentionError> {
        Ok(of(&self.x, tokens).autodiff())
    }

    fn blocks<'a>(&self, layers: &'a Layers) -> &'a [DynamicMaskAttention] {
        &layers.all
    }

    fn block(
        &self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        Ok(x.clone() + layers.try_attend(layer, x)?)
    }

    fn loss(
        &self,
        _: &Layers,
        tokens: Range<usize>,
        out: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError> {
        Ok(loss(out, of(&self.slope, tokens).autodiff()))
    }
}

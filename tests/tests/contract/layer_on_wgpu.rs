//! A layer on wgpu: its output, its gradients and a step of training are those of Flex.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
use flash_dma_tests::engines::{BurnOnFlex, BurnOnWgpu};
use flash_dma_tests::prelude::*;

const SHAPE: [usize; 3] = [2, 70, 32];

/// Normal numbers of a seed.
fn normal<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let mut rng = Rng::new(seed);
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_: usize| rng.normal() as f32)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Gives every parameter the numbers of its own seed, whatever the device.
struct Drawn(u64);

impl ModuleMapper for Drawn {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|tensor| {
            let drawn = normal(tensor.dims(), seed, &tensor.device()) * 0.2;
            drawn.detach().require_grad()
        })
    }
}

/// The parameters in their order, or their gradients.
struct All<'a>(Option<&'a GradientsParams>, Vec<Vec<f32>>);

impl All<'_> {
    fn of(layer: &DynamicMaskAttention, gradients: Option<&GradientsParams>) -> Vec<Vec<f32>> {
        let mut all = All(gradients, Vec::new());
        layer.visit(&mut all);
        all.1
    }
}

impl ModuleVisitor for All<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.push(match self.0 {
            Some(gradients) => gradients.get::<D>(param.id).map_or(Vec::new(), values),
            None => values(param.val().inner()),
        });
    }
}

/// The output, the gradients, and after a step the parameters and the output again, by name.
fn step(device: &Device) -> Vec<(String, Vec<f32>)> {
    let device = device.clone().autodiff();
    let layer = DynamicMaskAttentionConfig::new(SHAPE[2], 4)
        .with_n_kv_heads(Some(2))
        .with_selection(Selection::keep(9))
        .init(&device)
        .map(&mut Drawn(7));
    let [x, slope] = [1, 2].map(|seed| normal(SHAPE, seed, &device));
    let x = x.require_grad();
    let out = layer.forward(x.clone());
    let first = values(out.clone().inner());
    let grads = (out * slope).sum().backward();
    let of_x = values(x.grad(&grads).expect("tracked"));
    let grads = GradientsParams::from_grads(grads, &layer);
    let of_parameters = All::of(&layer, Some(&grads));
    let after = SgdConfig::new().init().step(1e-3, layer, grads);
    let second = values(after.forward(x).inner());
    let mut all = vec![
        ("out".into(), first),
        ("the gradient of x".into(), of_x),
        ("out after the step".into(), second),
    ];
    for (what, tensors) in [
        ("gradient", of_parameters),
        ("parameter", All::of(&after, None)),
    ] {
        let named = tensors.into_iter().enumerate();
        all.extend(named.map(|(n, values)| (format!("{what} {n}"), values)));
    }
    all
}

#[test]
fn a_step_of_training_is_that_of_flex_burn_wgpu() {
    let [expected, actual] = [
        step(shared::<BurnOnFlex>().device()),
        step(shared::<BurnOnWgpu>().device()),
    ];
    assert_eq!(expected.len(), actual.len());
    for ((name, expected), (_, actual)) in expected.iter().zip(&actual) {
        assert_eq!(expected.len(), actual.len(), "{name}");
        let most = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(most > 0.0, "{name}");
        for (n, (expected, actual)) in expected.iter().zip(actual).enumerate() {
            // Sums of some dozens of f32 in another order.
            let error = (expected - actual).abs() / most;
            assert!(error < 1e-5, "{name}, {n}: {actual} instead of {expected}");
        }
    }
}

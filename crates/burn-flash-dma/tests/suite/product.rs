//! `linear` and `product` on Flex: refusals, and their place in the graph. Results and gradients on every backend are
//! tested with the kernels.

use crate::case::{data, random, recording, refused_as, values, within};
use crate::layer::cast;
use burn::backend::ops::FloatTensorOps;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_dma::fallback::product as default;
use burn_flash_dma::ops::ProductOps;
use burn_flash_dma::{ElementType, product, try_linear, try_product};
use burn_flex::Flex;

fn layer(device: &Device) -> Linear {
    LinearConfig::new(24, 10).init(device)
}

#[test]
fn bad_operands_are_refused() {
    let device = Device::flex();
    let weight = random([24, 10], &device);
    let text = "the weight must have size 23 on axis 0, but has 24";
    let narrow = try_product(random([2, 5, 23], &device), weight.clone());
    refused_as(narrow, text);
    let narrow = try_linear(&layer(&device), random([7, 23], &device));
    refused_as(narrow, text);
    let wide = try_product(random([2, 24], &device).cast(DType::F64), weight);
    refused_as(wide, "x must be f32, f16 or bf16, but is f64");
}

#[test]
#[should_panic(expected = "the weight must have size 23 on axis 0, but has 24")]
fn the_plain_form_panics_with_the_text() {
    let device = Device::flex();
    let _ = product(random([2, 5, 23], &device), random([24, 10], &device));
}

/// Element types that the kernels do not have go to Burn.
#[test]
fn other_types_are_burns_own() {
    let device = Device::flex();
    let wide = cast(layer(&device), DType::F64);
    let x = random([3, 5, 24], &device).cast(DType::F64);
    let y = try_linear(&wide, x.clone()).unwrap();
    assert_eq!(y.dtype(), DType::F64);
    assert!(values(y) == values(wide.forward(x)));
}

#[test]
fn empty_products_have_defined_results() {
    let device = Device::flex().autodiff();
    for [tokens, d_in, d_out] in [[0, 4, 3], [2, 0, 3], [2, 4, 0]] {
        let x = random([2, tokens, d_in], &device);
        let y = product(x, random([d_in, d_out], &device));
        assert_eq!(y.dims(), [2, tokens, d_out]);
        assert!(values(y).iter().all(|&y| y == 0.0));
    }
}

/// Equal to Burn's own layer, in the result and in exactly the tracked gradients, with recomputed parents or not.
#[test]
fn a_layer_is_burns_layer() {
    let plain = Device::flex();
    let (stored, slopes) = (random([2, 7, 24], &plain), random([2, 7, 10], &plain));
    let (stored, slopes) = (stored.into_data(), slopes.into_data());
    let weight = random([24, 10], &plain).into_data();
    for device in recording() {
        let load = |data: &TensorData| Tensor::<3>::from_data(data.clone(), &device);
        for [track_x, track_weight] in [[true, true], [true, false], [false, true]] {
            let run = |ours: bool| {
                let x = load(&stored).set_require_grad(track_x);
                let w = Tensor::<2>::from_data(weight.clone(), &device);
                let w = w.set_require_grad(track_weight);
                // Operations whose outputs a checkpointing device drops.
                let (inner, turned) = (x.clone() * 0.5 + 0.25, (w.clone() * 2.0).tanh());
                let y = match ours {
                    true => product(inner, turned),
                    false => inner.matmul(turned.unsqueeze()),
                };
                let grads = (y.clone() * load(&slopes)).sum().backward();
                let of_x = x.grad(&grads).map(values);
                (values(y), of_x, w.grad(&grads).map(values))
            };
            let (ours, burns) = (run(true), run(false));
            assert_eq!(ours.1.is_some(), track_x);
            assert_eq!(ours.2.is_some(), track_weight);
            close(&ours.0, &burns.0);
            for (ours, burns) in [(ours.1, burns.1), (ours.2, burns.2)] {
                if let (Some(ours), Some(burns)) = (ours, burns) {
                    close(&ours, &burns);
                }
            }
        }
    }
}

/// Sums of at most 24 terms of about 1, in two orders.
#[track_caller]
fn close(a: &[f64], b: &[f64]) {
    within(a, b, 1e-4, "sums");
}

/// The trait's default bodies, for a weight of another type.
#[test]
fn default_bodies_round_once() {
    let load = |value: f32, shape: [usize; 2]| {
        let values = vec![value; shape[0] * shape[1]];
        Flex::float_from_data(data(values, shape), &Default::default())
    };
    let narrow = |tensor| Flex::float_cast(tensor, burn::tensor::FloatDType::BF16);
    // 257 is no bf16: a sum rounded on its way would stay 256.
    let x = narrow(load(1.0, [2, 300]));
    let weight = load(1.0, [300, 2]);
    let read = |tensor| {
        let data = burn::tensor::read_sync(Flex::float_into_data(tensor)).unwrap();
        data.iter::<f64>().collect::<Vec<_>>()
    };
    let y = Flex::linear_product(x.clone(), weight.clone());
    assert_eq!(read(y), vec![300.0; 4]);
    let ones = || narrow(load(1.0, [300, 2]));
    let dw = Flex::linear_product_weight_gradient(ones(), ones(), ElementType::F32);
    assert_eq!(read(dw), vec![300.0; 4]);
    let dx = Flex::linear_product_input_gradient(narrow(load(3.0, [1, 2])), weight);
    assert_eq!(read(dx), vec![6.0; 300]);
    let same = default::output::<Flex>(x, load(2.0, [300, 1]));
    assert_eq!(read(same), vec![600.0; 2]);
}

//! Linear layers through Burn: results and gradients.

use super::{Lies, Matrix, same};
use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::{linear, product, split_heads};
use flash_dma_reference::round::round;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{self, dtype, values};

every_burn!(
    results_and_gradients,
    strided_and_transposed_inputs,
    layers_of_f32_on_16_bits,
    heads_of_one_product,
    repeated_gradients_are_bit_equal,
    empty_products_have_gradients,
);

/// Tokens, `d_in` and `d_out`.
fn sizes<B: Backend>() -> Vec<[usize; 3]> {
    let mut sizes = vec![[17, 33, 5]];
    match B::SIZE {
        Size::Small => {}
        Size::Medium => sizes.extend([[1, 24, 40], [257, 100, 70], [1000, 72, 200]]),
        // The last two are past the size from which kernels of tensor cores and parts are chosen.
        Size::Large => sizes.extend([[1, 24, 40], [4999, 200, 264], [32768, 256, 64]]),
    }
    sizes
}

fn load(matrix: &Matrix, element: ElementType, device: &Device) -> Tensor<2> {
    tensors::load(&matrix.values, matrix.shape, element, device)
}

/// `x`, the weight, and the gradient of the output.
fn operands([tokens, d_in, d_out]: [usize; 3]) -> [Matrix; 3] {
    let mut rng = Rng::new((tokens + d_in + d_out) as u64);
    [[tokens, d_in], [d_in, d_out], [tokens, d_out]].map(|shape| Matrix::random(shape, &mut rng))
}

/// Each variant compiles for seconds on a GPU, on CubeCL's CPU runtime for many.
fn supported<B: Backend>(burn: &Burn<B>) -> impl Iterator<Item = ElementType> {
    let all = match B::SIZE {
        Size::Small => vec![Bf16],
        Size::Medium => vec![F32, F16, Bf16],
        Size::Large => vec![F32, Bf16],
    };
    all.into_iter()
        .filter(move |&element| burn.supports(element))
}

fn results_and_gradients<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    for size in sizes::<B>() {
        let [x, weight, grad] = operands(size);
        for element in supported(burn) {
            let what = format!("{size:?} of {element}");
            let tensors = [&x, &weight].map(|m| load(m, element, &device).require_grad());
            let y = product(tensors[0].clone(), tensors[1].clone());
            same(&values(y.clone()), &x.times(&weight, element), &what);

            let grads = (y * load(&grad, element, &device)).sum().backward();
            let [dx, dw] = tensors.map(|t| tensors::grad(&t, &grads));
            same(&dx, &grad.times(&weight.transposed(), element), &what);
            same(&dw, &x.transposed().times(&grad, element), &what);
        }
    }
}

/// A slice of a wider tensor, a transposed one, and axes of tokens that are not merged yet.
fn strided_and_transposed_inputs<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let size @ [tokens, d_in, d_out] = [36, 24, 40];
    let [x, weight, grad] = operands(size);
    let element = if device.supports_dtype(DType::BF16) {
        Bf16
    } else {
        F32
    };
    let wide = |m: &Matrix| {
        let t = load(m, element, &device);
        let rows = m.shape[0];
        let padding = Tensor::<2>::full([rows, 3], 5.0, (&device, dtype(element)));
        Tensor::cat(vec![padding.clone(), t, padding], 1).narrow(1, 3, m.shape[1])
    };
    let turned = |m: &Matrix| load(&m.transposed(), element, &device).transpose();
    let exact = x.times(&weight, element);
    for lay in [&wide as &dyn Fn(&Matrix) -> Tensor<2>, &turned] {
        let (given_x, given_weight) = (lay(&x).require_grad(), lay(&weight).require_grad());
        let y = product(given_x.clone(), given_weight.clone());
        same(&values(y.clone()), &exact, "strided");
        let grads = (y * lay(&grad)).sum().backward();
        let dx = tensors::grad(&given_x, &grads);
        same(&dx, &grad.times(&weight.transposed(), element), "dx");
        let dw = tensors::grad(&given_weight, &grads);
        same(&dw, &x.transposed().times(&grad, element), "dw");
    }
    // `[4, 9, d_in]` through a transpose of its first two axes.
    let raw = x.raw(element, Lies::Rows);
    let four = tensors::load(&raw.values, [4, tokens / 4, d_in], element, &device);
    let turned = four.swap_dims(0, 1).mul_scalar(1.0).swap_dims(0, 1);
    let y = product(turned, load(&weight, element, &device));
    assert_eq!(y.dims(), [4, tokens / 4, d_out]);
    same(&values(y), &exact, "three axes");
}

/// The layer stays f32: its weight is rounded for the product, and its gradients are not.
fn layers_of_f32_on_16_bits<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    for element in supported(burn) {
        let [x, weight, grad] = operands([300, 24, 40]);
        let bias: Vec<f32> = (0..40).map(|i| (i % 8) as f32).collect();
        let layer = Linear {
            weight: Param::from_tensor(load(&weight, F32, &device).require_grad()),
            bias: Some(Param::from_tensor(
                Tensor::from_floats(bias.as_slice(), &device).require_grad(),
            )),
        };
        let given = load(&x, element, &device).require_grad();
        let y = linear(&layer, given.clone());
        assert_eq!(y.dtype(), dtype(element));
        let exact: Vec<f64> = (x.times(&weight, element).iter().enumerate())
            .map(|(at, y)| round(y + f64::from(bias[at % 40]), element))
            .collect();
        same(&values(y.clone()), &exact, "with a bias");

        let grads = (y * load(&grad, element, &device)).sum().backward();
        let dw = layer.weight.grad(&grads).expect("tracked");
        assert_eq!(dw.dtype(), DType::F32);
        same(&values(dw), &x.transposed().times(&grad, F32), "dw in f32");
        let dx = given.grad(&grads).expect("tracked");
        assert_eq!(dx.dtype(), dtype(element));
        let exact = grad.times(&weight.transposed(), element);
        same(&values(dx), &exact, "dx");
    }
}

/// q, k and v of one product, with a loss of all three and of two of them.
fn heads_of_one_product<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let (tokens, parts, head_dim) = (40, [4, 1, 1], 16);
    for element in supported(burn) {
        for used in [3, 2] {
            let [x, weight, mut grad] = operands([tokens, 24, 6 * head_dim]);
            let tensors = [&x, &weight].map(|m| load(m, element, &device).require_grad());
            let y = product(tensors[0].clone(), tensors[1].clone());
            let heads = split_heads(y.reshape([2, tokens / 2, 6, head_dim]), parts);
            let mut first = 0;
            let mut loss = Tensor::<1>::zeros([1], &device);
            let exact = x.times(&weight, element);
            for (index, (part, count)) in heads.into_iter().zip(parts).enumerate() {
                let columns = first * head_dim..(first + count) * head_dim;
                let part = part.reshape([tokens, count * head_dim]);
                let of_part = |all: &[f64]| -> Vec<f64> {
                    let rows = all.chunks(6 * head_dim);
                    rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
                };
                same(&values(part.clone()), &of_part(&exact), "a part");
                if index < used {
                    let grad = Matrix {
                        shape: [tokens, count * head_dim],
                        values: of_part(&grad.values),
                    };
                    let of_loss = part * load(&grad, element, &device);
                    loss = loss + of_loss.cast(DType::F32).sum();
                } else {
                    let rows = grad.values.chunks_mut(6 * head_dim);
                    rows.for_each(|row| row[columns.clone()].fill(0.0));
                }
                first += count;
            }
            let grads = loss.backward();
            let [dx, dw] = tensors.map(|t| tensors::grad(&t, &grads));
            let what = format!("{element}, {used} parts used");
            same(&dx, &grad.times(&weight.transposed(), element), &what);
            same(&dw, &x.transposed().times(&grad, element), &what);
        }
    }
}

fn repeated_gradients_are_bit_equal<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let tokens = if B::SIZE == Size::Large { 32768 } else { 600 };
    let mut rng = Rng::new(5);
    let shapes = [[tokens, 64], [64, 48], [tokens, 48]];
    let [x, weight, grad] = shapes.map(|shape| Matrix::normal(shape, &mut rng));
    for element in supported(burn) {
        let [first, second] = [(); 2].map(|()| {
            let given = load(&weight, F32, &device).require_grad();
            let y = product(load(&x, element, &device), given.clone());
            let grads = (y * load(&grad, element, &device)).sum().backward();
            tensors::grad(&given, &grads)
        });
        assert!(first == second, "{element}");
    }
}

fn empty_products_have_gradients<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    for [tokens, d_in, d_out] in [[0, 4, 3], [2, 0, 3], [2, 4, 0]] {
        let x = Tensor::<2>::ones([tokens, d_in], &device).require_grad();
        let weight = Tensor::<2>::ones([d_in, d_out], &device).require_grad();
        let y = product(x.clone(), weight.clone());
        assert_eq!(values(y.clone()), vec![0.0; tokens * d_out]);
        let grads = y.sum().backward();
        let zeros = |tensor: &Tensor<2>| {
            let grad = tensor.grad(&grads).expect("it is tracked");
            assert_eq!(grad.dims(), tensor.dims());
            assert!(values(grad).iter().all(|&x| x == 0.0));
        };
        zeros(&x);
        zeros(&weight);
    }
}

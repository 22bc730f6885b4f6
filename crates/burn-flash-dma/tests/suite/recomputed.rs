//! Results that a backward pass recomputes: nothing keeps them, and nothing else changes. SwiGLU against f64 and
//! Burn's operations.

use crate::case::{
    ELEMENTS, dtype, grad, loss, random, recording, refused_as, size, tensor, values, within,
};
use burn::nn::RotaryEncodingConfig;
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::{Attention, ElementType, HeadEncoding, product, rms_norm, swiglu, try_swiglu};
use flash_dma_reference::Rng;
use flash_dma_reference::generate::normal;

/// Gates of all sizes, with the gradient of the result.
fn operands(element: ElementType) -> [Vec<f64>; 3] {
    let mut gate = normal(6 * 35, 4.0, element, &mut Rng::new(1));
    gate[..5].copy_from_slice(&[0.0, 100.0, -100.0, 15.0, -15.0]);
    let up = normal(6 * 35, 1.0, element, &mut Rng::new(2));
    let slope = normal(6 * 35, 1.0, element, &mut Rng::new(3));
    [gate, up, slope]
}

const SHAPE: [usize; 3] = [2, 3, 35];

#[test]
fn swiglu_and_its_gradients_are_those_of_the_formula() {
    for element in ELEMENTS {
        let [gates, ups, slopes] = operands(element);
        let load = |values: &[f64]| tensor(values, SHAPE, element, &Device::flex().autodiff());
        let (gate, up) = (load(&gates).require_grad(), load(&ups).require_grad());
        let out = swiglu(gate.clone(), up.clone());
        assert_eq!((out.dims(), out.dtype()), (SHAPE, dtype(element)));
        let out_values = values(out.clone());
        let grads = loss(out, load(&slopes)).backward();
        let (of_gate, of_up) = (grad(&gate, &grads), grad(&up, &grads));

        // f32 arithmetic, and one rounding to the type.
        let rounding = match element {
            ElementType::F32 => 0.0,
            ElementType::F16 => 0.5 / 1024.0,
            ElementType::Bf16 => 0.5 / 128.0,
        };
        let check = |name: &str, at: usize, actual: f64, exact: f64, size: f64| {
            let error = (actual - exact).abs();
            // Plus the smallest f16.
            let bound = rounding * exact.abs() + 4e-6 * size + 3e-8;
            let near = error <= bound;
            assert!(near, "{element} {name} {at}: {actual} is not {exact}");
        };
        for at in 0..gates.len() {
            let (g, u, d) = (gates[at], ups[at], slopes[at]);
            let s = 1.0 / (1.0 + (-g).exp());
            check("out", at, out_values[at], g * s * u, (g * s * u).abs());
            let exact = d * u * s * (1.0 + g * (1.0 - s));
            let size = (d * u).abs() * s * (1.0 + g.abs());
            check("of gate", at, of_gate[at], exact, size);
            check("of up", at, of_up[at], d * g * s, (d * g * s).abs());
        }
    }
}

#[test]
fn swiglu_is_burns_composition_in_f32() {
    for element in ELEMENTS {
        let [gate, up, _] = operands(element).map(|t| tensor(&t, SHAPE, element, &Device::flex()));
        let wide = |t: &Tensor<3>| t.clone().cast(DType::F32);
        let composed = (silu(wide(&gate)) * wide(&up)).cast(dtype(element));
        assert!(values(swiglu(gate, up)) == values(composed), "{element}");
    }
}

#[test]
fn swiglu_refuses_what_does_not_fit() {
    let device = Device::flex();
    let gate = random([2, 3, 8], &device);
    let longer = try_swiglu(gate.clone(), random([2, 3, 9], &device));
    refused_as(longer, "up must have size 8 on axis 2, but has 9");
    let mixed = try_swiglu(gate.clone(), gate.clone().cast(DType::BF16));
    refused_as(mixed, "up must be f32, but is bf16");
    let wide = gate.cast(DType::F64);
    let text = "the gate must be f32, f16 or bf16, but is f64";
    refused_as(try_swiglu(wide.clone(), wide), text);
    let none = swiglu(random([2, 0, 8], &device), random([2, 0, 8], &device));
    assert_eq!(none.dims(), [2, 0, 8]);
}

/// True if a recorded graph holds a tensor.
fn kept<const D: usize>(tensor: &Tensor<D>) -> bool {
    !tensor.can_mut()
}

#[test]
fn graphs_keep_what_results_are_made_of() {
    for device in recording() {
        let fresh = || {
            let x = random::<3>([2, 9, 32], &device).require_grad();
            x.matmul(random([1, 32, 32], &device))
        };
        let weight = random([32, 10], &device).require_grad();
        let x = fresh();
        assert!(!kept(&x));
        let _y = product(x.clone(), weight.clone());
        assert!(kept(&x));

        let gamma = random([32], &device).require_grad();
        let x = fresh();
        let normal = rms_norm(x.clone(), gamma, 1e-5);
        let _several = [(); 3].map(|()| product(normal.clone(), weight.clone()));
        assert!(kept(&x) && !kept(&normal));

        let (gate, up) = (fresh(), fresh());
        let hidden = swiglu(gate.clone(), up.clone());
        let _y = product(hidden.clone(), weight.clone());
        assert!(kept(&gate) && kept(&up) && !kept(&hidden));

        let rope = RotaryEncodingConfig::new(9, 8).init(&device);
        let gamma = random([8], &device).require_grad();
        let encode = || {
            let encoding = HeadEncoding::new(fresh().reshape([2, 9, 4, 8]));
            let encoding = encoding.norm(gamma.clone(), 1e-5);
            encoding.rotary(rope.freq_complex.clone(), 0).forward()
        };
        let (q, k) = (encode(), encode());
        let v = fresh().reshape([2, 9, 4, 8]).swap_dims(1, 2);
        let _out = Attention::new(q.clone(), k.clone(), v).forward();
        assert!(!kept(&q) && !kept(&k));
    }
}

/// Whichever inputs are tracked, the gradients equal those of a graph cut at the result, which is a leaf that the
/// next graph keeps.
#[test]
fn gradients_are_those_of_a_kept_result() {
    let plain = Device::flex();
    for device in recording() {
        for tracked in [[true, true], [true, false], [false, true], [false, false]] {
            for dtype in [DType::F32, DType::BF16] {
                let load = |tensor: Tensor<3>, tracked: bool| {
                    let tensor = Tensor::<3>::from_data(tensor.into_data(), &device);
                    tensor.cast(dtype).detach().set_require_grad(tracked)
                };
                let stored = [random::<3>([2, 9, 24], &plain), random([2, 9, 24], &plain)];
                let gamma = random::<1>([24], &plain).into_data();
                let (weight, slope) = (random([24, 10], &plain), random([2, 9, 10], &plain));
                let (weight, slope) = (weight.into_data(), slope.into_data());
                let run = |cut: bool| {
                    let [x, up] = [0, 1].map(|n| load(stored[n].clone(), tracked[n]));
                    let gamma = Tensor::<1>::from_data(gamma.clone(), &device).cast(dtype);
                    let gamma = gamma.detach().set_require_grad(tracked[1]);
                    let weight = Tensor::<2>::from_data(weight.clone(), &device).require_grad();
                    let slope = Tensor::<3>::from_data(slope.clone(), &device).cast(dtype);
                    // A recomputed result made of another one, and read twice.
                    let result = swiglu(rms_norm(x.clone(), gamma.clone(), 1e-5), up.clone());
                    let read = match cut {
                        true => result.clone().detach().require_grad(),
                        false => result.clone(),
                    };
                    let [y, again] = [(); 2].map(|()| product(read.clone(), weight.clone()));
                    let y = y * again;
                    let mut grads = loss(y, slope).backward();
                    let of_weight = grad(&weight, &grads);
                    if cut && tracked != [false, false] {
                        let gradient = read.grad(&grads).unwrap().into_data();
                        let gradient = Tensor::from_data(gradient, &device);
                        grads = loss(result, gradient).backward();
                    }
                    let [of_x, of_up] = [x, up].map(|t| t.grad(&grads).map(values));
                    let of_gamma = gamma.grad(&grads).map(values);
                    (of_weight, [of_x, of_up], of_gamma)
                };
                let (ours, kept) = (run(false), run(true));
                assert_eq!(ours.1.each_ref().map(Option::is_some), tracked);
                assert!(ours == kept, "{tracked:?} {dtype:?}");
            }
        }
    }
}

/// Kernels and fusion give the same, where a result is recomputed on another stream of operations.
#[cfg(all(feature = "cpu", feature = "fusion"))]
#[test]
fn kernels_make_the_same_again() {
    let plain = Device::flex();
    let stored = [random::<3>([2, 9, 24], &plain), random([2, 9, 16], &plain)];
    let gamma = random::<1>([24], &plain);
    let weights = [random::<2>([24, 16], &plain), random([16, 24], &plain)];
    let by = |device: Device| {
        let device = device.autodiff();
        let [x, up] = [0, 1].map(|n| {
            let tensor = Tensor::<3>::from_data(stored[n].to_data(), &device);
            tensor.cast(DType::BF16).detach().require_grad()
        });
        let gamma = Tensor::<1>::from_data(gamma.to_data(), &device).cast(DType::BF16);
        let gamma = gamma.detach().require_grad();
        let [first, second] = [0, 1].map(|n| {
            let weight = Tensor::<2>::from_data(weights[n].to_data(), &device);
            weight.require_grad()
        });
        let gate = product(rms_norm(x.clone(), gamma.clone(), 1e-5), first.clone());
        let y = product(swiglu(gate, up.clone()), second.clone());
        let grads = loss(y.clone(), y.clone().detach()).backward();
        [
            values(y),
            grad(&x, &grads),
            grad(&up, &grads),
            grad(&gamma, &grads),
            grad(&first, &grads),
            grad(&second, &grads),
        ]
    };
    let _alone = crate::case::alone();
    let (flex, cube) = (by(Device::flex()), by(Device::cpu()));
    for (n, (flex, cube)) in flex.iter().zip(&cube).enumerate() {
        // bf16 numbers that round the other way, and their consequences.
        within(cube, flex, size(flex) / 64.0, format_args!("tensor {n}"));
    }
}

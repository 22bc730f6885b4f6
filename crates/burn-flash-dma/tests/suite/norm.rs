//! Norms and rotary encoding: the default bodies against the oracle, Burn's own modules, and the layer against the
//! composition of Burn's operations that it replaces.

use crate::case::{
    ELEMENTS, close, data, dtype, grad, loss, random, recording, size, tensor, values, within,
};
use crate::layer;
use crate::operations::primitive;
use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::nn::{RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::fallback::norm as fallback;
use burn_flash_dma::nn::{DynamicMaskAttention, QkNorm, Rope, Scores, Selection};
use burn_flash_dma::ops::{NormGrads, Normed, OptionalFloat};
use burn_flash_dma::{
    Attention, ElementType, HeadEncoding, NormProblem, Rotary, Selector, rms_norm, rms_norm_branch,
};
use flash_dma_reference::Rng;
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare};
use flash_dma_reference::generate::normal;
use flash_dma_reference::norm::Norm;

fn problems(element: ElementType) -> Vec<NormProblem> {
    let rotary = |positions, start| Some(Rotary { positions, start });
    let heads = |shape: [usize; 4], norm: bool, rotary| {
        let gamma = [shape[3]];
        let norm = norm.then_some((&gamma[..], 1e-5));
        NormProblem::heads(&shape, norm, rotary, element).unwrap()
    };
    vec![
        NormProblem::rows(&[1, 5], &[5], element, 1e-5).unwrap(),
        NormProblem::rows(&[600, 17], &[17], element, 1e-3).unwrap(),
        heads([2, 113, 3, 16], true, rotary(120, 5)),
        heads([1, 17, 2, 24], true, None),
        heads([2, 9, 1, 8], false, rotary(9, 0)),
        heads([2, 0, 1, 8], true, rotary(9, 0)),
    ]
}

/// The table in Burn's layout: every pair's angle twice.
fn table(inputs: &Norm, device: &Device) -> Option<Tensor<3>> {
    let [positions, pairs, _] = inputs.problem.table_shape()?;
    let table = inputs.table.as_ref()?.chunks(2);
    let values = table.flat_map(|pair| [pair[0], pair[1], pair[0], pair[1]].map(|x| x as f32));
    let values = data(values, [positions, 2 * pairs, 2]);
    Some(Tensor::from_data(values, device))
}

#[test]
fn the_default_bodies_match_the_oracle() {
    let device = Device::flex();
    for p in ELEMENTS.into_iter().flat_map(problems) {
        let inputs = Norm::random(p, 3);
        let len = p.x_shape().iter().product();
        let grad_out = normal(len, 1.0, p.element, &mut Rng::new(4));
        let load = |values: &[f64], shape| primitive(tensor(values, shape, p.element, &device));
        let x = || load(&inputs.x, p.x_shape());
        let gamma = || {
            let gamma = inputs.gamma.as_ref()?;
            Some(primitive(tensor(gamma, [p.width], p.element, &device)))
        };
        let table = || table(&inputs, &device).map(primitive);
        let out = fallback::encode_heads::<Flex>(x(), optional(gamma()), optional(table()), p);
        let normed = match gamma() {
            None => Normed::None,
            Some(gamma) => Normed::Some { x: x(), gamma },
        };
        let grad = load(&grad_out, p.out_shape());
        let NormGrads { x, gamma } =
            fallback::encode_heads_backward::<Flex>(grad, normed, optional(table()), p);

        let read = |t, shape: [usize; 4]| {
            let tensor = Tensor::<4>::from_primitive::<Flex>(t);
            assert_eq!((tensor.dims(), tensor.dtype()), (shape, dtype(p.element)));
            values(tensor)
        };
        let check = |name, shape: &[usize], actual: &[f64], exact, naive: &[f64], factor| {
            compare(name, shape, actual, exact, naive, p.element, factor)
                .unwrap_or_else(|failure| panic!("{p:?}: {failure}"));
        };
        let (exact, naive) = (inputs.forward(), inputs.naive_forward());
        let actual = read(out, p.out_shape());
        check("out", &p.out_shape(), &actual, &exact, &naive, OUTPUT);
        let (exact, naive) = (inputs.backward(&grad_out), inputs.naive_backward(&grad_out));
        let actual = read(x, p.x_shape());
        check("dx", &p.x_shape(), &actual, &exact.x, &naive.x, GRADIENT);
        let gamma = match gamma {
            OptionalFloat::None => None,
            OptionalFloat::Some(t) => Some(values(Tensor::<1>::from_primitive::<Flex>(t))),
        };
        assert_eq!(gamma.is_some(), exact.gamma.is_some());
        if let (Some(gamma), Some(exact), Some(naive)) = (gamma, exact.gamma, naive.gamma) {
            check("dgamma", &[p.width], &gamma, &exact, &naive, GRADIENT);
        }
    }
}

fn optional(tensor: Option<FloatTensor<Flex>>) -> OptionalFloat<Flex> {
    match tensor {
        None => OptionalFloat::None,
        Some(tensor) => OptionalFloat::Some(tensor),
    }
}

/// Rows of any rank, strided or not.
#[test]
fn rows_of_any_rank_are_those_of_burns_module() {
    let device = Device::flex().autodiff();
    let norm = RmsNormConfig::new(24).with_epsilon(1e-3).init(&device);
    let gamma = random([24], &device).require_grad();
    let norm = RmsNorm {
        gamma: burn::module::Param::from_tensor(gamma.clone()),
        ..norm
    };
    fn both<const D: usize>(x: Tensor<D>, norm: &RmsNorm) {
        let weights = random(x.dims(), &x.device());
        let results = [false, true].map(|ours| {
            let x = x.clone().detach().require_grad();
            // A transposed tensor of two axes or more is strided.
            let turn = |x: Tensor<D>| if D > 2 { x.swap_dims(0, 1) } else { x };
            let rows = turn(x.clone());
            let out = turn(match ours {
                true => rms_norm(rows, norm.gamma.val(), norm.epsilon as f32),
                false => norm.forward(rows),
            });
            let grads = loss(out.clone(), weights.clone()).backward();
            let of_gamma = grad(&norm.gamma.val(), &grads);
            [values(out.inner()), grad(&x, &grads), of_gamma]
        });
        for (ours, theirs) in results[1].iter().zip(&results[0]) {
            close(ours, theirs, 1e-6);
        }
    }
    both(random([24], &device), &norm);
    both(random([9, 24], &device), &norm);
    both(random([3, 5, 24], &device), &norm);
    both(random([2, 3, 5, 24], &device), &norm);
}

/// Slices of one product of q, k and v, read in place: values and gradients equal those of copies, and elements
/// outside the slices get none.
#[test]
fn slices_of_a_packed_projection() {
    let device = Device::flex().autodiff();
    let (heads, dim) = (3, 16);
    let rope = RotaryEncodingConfig::new(40, dim).init(&device);
    let gamma = random([dim], &device);
    for element in [DType::F32, DType::BF16] {
        let packed = random([2, 17, 2 * heads + 1, dim], &device).cast(element);
        let gamma = gamma.clone().cast(element);
        let weights = random([2, heads, 17, dim], &device).cast(element);
        let results = [false, true].map(|sliced| {
            let packed = packed.clone().detach().require_grad();
            let gamma = gamma.clone().detach().require_grad();
            let x = packed.clone().narrow(2, 2, heads);
            let x = if sliced { x } else { x.mul_scalar(1.0) };
            let out = HeadEncoding::new(x)
                .norm(gamma.clone(), 1e-5)
                .rotary(rope.freq_complex.clone(), 7)
                .forward();
            assert_eq!(out.dtype(), element);
            let grads = loss(out.clone(), weights.clone()).backward();
            let of_gamma = grad(&gamma, &grads);
            [values(out.inner()), grad(&packed, &grads), of_gamma]
        });
        assert!(results[0] == results[1], "{element:?}");
        let unused = results[0][1].chunks(dim).step_by(2 * heads + 1);
        assert!(unused.flatten().all(|&x| x == 0.0));
    }
}

#[test]
fn only_what_is_tracked_gets_a_gradient() {
    let device = Device::flex().autodiff();
    let rope = RotaryEncodingConfig::new(9, 8).init(&device);
    for (of_x, of_gamma) in [(true, false), (false, true), (false, false)] {
        let x = random([1, 9, 2, 8], &device).set_require_grad(of_x);
        let gamma = random([8], &device).set_require_grad(of_gamma);
        let heads = HeadEncoding::new(x.clone()).norm(gamma.clone(), 1e-5);
        let heads = heads.rotary(rope.freq_complex.clone(), 0).forward();
        let rows = rms_norm(x.clone(), gamma.clone(), 1e-5);
        if !of_x && !of_gamma {
            continue;
        }
        let grads = (heads.sum() + rows.sum()).backward();
        assert_eq!(x.grad(&grads).is_some(), of_x);
        assert_eq!(gamma.grad(&grads).is_some(), of_gamma);
    }
}

/// Values and gradients of a tensor and its norm, whichever the loss depends on.
#[test]
fn a_branch_is_its_input_and_the_norm_of_it() {
    for device in recording() {
        for element in ELEMENTS {
            for used in [[true, true], [true, false], [false, true]] {
                let run = |ours: bool| {
                    let load = |shape: [usize; 3], seed| {
                        let count = shape.iter().product();
                        let values = normal(count, 1.0, element, &mut Rng::new(seed));
                        Tensor::<3>::from_data(data(values, shape), (&device, dtype(element)))
                    };
                    let x = load([2, 5, 24], 1).require_grad();
                    let gamma = load([1, 1, 24], 2).reshape([24]).detach().require_grad();
                    let inner = x.clone() * 0.5;
                    let [residual, normed] = match ours {
                        true => rms_norm_branch(inner, gamma.clone(), 1e-5),
                        false => [inner.clone(), rms_norm(inner, gamma.clone(), 1e-5)],
                    };
                    let mut loss = Tensor::<1>::zeros([1], &device);
                    let parts = [(residual.clone(), 3), (normed.clone(), 4)];
                    for ((part, seed), used) in parts.into_iter().zip(used) {
                        if used {
                            let slopes = load([2, 5, 24], seed);
                            loss = loss + (part * slopes).cast(DType::F32).sum();
                        }
                    }
                    let grads = loss.backward();
                    let of_gamma = gamma.grad(&grads).map(values);
                    (values(residual), values(normed), grad(&x, &grads), of_gamma)
                };
                let (ours, plain) = (run(true), run(false));
                assert!(ours == plain, "{element:?} {used:?}");
            }
        }
    }
}

/// The layer as Burn's own operations compute it, one after another.
fn composed(
    layer: &DynamicMaskAttention,
    x: Tensor<3>,
    heads: [usize; 2],
    window: usize,
) -> Tensor<3> {
    let [batch, len, _] = x.dims();
    let split = |t: Tensor<3>, heads: usize| {
        let width = t.dims()[2];
        t.reshape([batch, len, heads, width / heads])
    };
    let place = |t: Tensor<4>, norm: &Option<RmsNorm>, rope: &Option<RotaryEncoding>| {
        let t = norm.as_ref().map_or(t.clone(), |norm| norm.forward(t));
        let t = t.swap_dims(1, 2);
        rope.as_ref().map_or(t.clone(), |rope| rope.forward(t))
    };
    let q = split(layer.q_proj.forward(x.clone()), heads[0]);
    let k = split(layer.k_proj.forward(x.clone()), heads[1]);
    let v = split(layer.v_proj.forward(x.clone()), heads[1]).swap_dims(1, 2);
    let scores = layer.scores(x);
    let intervals = Selector::top(window).select(scores.clone());
    let q = place(q, &layer.q_norm, &layer.rope);
    let k = place(k, &layer.k_norm, &layer.rope);
    let attention = Attention::new(q, k, v).options(layer.options());
    let out = attention.scores(scores).intervals(&intervals).forward();
    let width = layer.q_proj.weight.dims()[1];
    let out = out.swap_dims(1, 2).reshape([batch, len, width]);
    layer.o_proj.forward(out)
}

#[test]
fn the_layer_is_the_composition_of_burns_operations() {
    let device = Device::flex().autodiff();
    for (norm, positions) in [
        (QkNorm::default(), Some(40)),
        (QkNorm::default(), None),
        (QkNorm::None, Some(33)),
        (QkNorm::None, None),
    ] {
        let layer = layer::config()
            .with_selection(Selection::keep(6))
            .with_scores(Scores::Dma)
            .with_qk_norm(norm)
            .with_rope(positions.map(Rope::new))
            .init(&device);
        let x = random([2, 33, 32], &device);
        let weights = random([2, 33, 32], &device);
        let results = [false, true].map(|ours| {
            let x = x.clone().detach().require_grad();
            let out = match ours {
                true => layer.forward(x.clone()),
                false => composed(&layer, x.clone(), [4, 2], 6),
            };
            let grads = loss(out.clone(), weights.clone()).backward();
            let mut all = vec![values(out.inner()), grad(&x, &grads)];
            for projection in [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj] {
                all.push(grad(&projection.weight.val(), &grads));
            }
            for norm in [&layer.q_norm, &layer.k_norm].into_iter().flatten() {
                all.push(grad(&norm.gamma.val(), &grads));
            }
            all
        });
        for (n, (ours, theirs)) in results[1].iter().zip(&results[0]).enumerate() {
            let what = format!("norm {norm:?}, {positions:?}, tensor {n}");
            within(ours, theirs, 3e-6 * size(theirs), what);
        }
    }
}

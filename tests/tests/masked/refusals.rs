//! A mismatch is a typed error that names the tensor and the axis, and no result is written.

use crate::refused::{self, assert_refused};
use flash_dma_problem::{AttentionError as Error, MaskedProblem, PlanGeometry, TensorName as Name};
use flash_dma_tests::prelude::*;

raw_engines!(shapes, plans, strides, short_buffers, masks, biases);
// The CPU engine's views have their rank in their type.
kernel_engines!(wrong_ranks);
#[cfg(feature = "burn")]
flash_dma_tests::fast_burn!(shapes_that_do_not_broadcast);

const MASK: [usize; 4] = [2, 2, 9, 70];
const BIAS: [usize; 4] = [1, 4, 9, 70];

fn good() -> MaskedCall {
    let case = MaskedCase::new([2, 4, 2, 9, 70, 8])
        .mask(MASK, Pattern::Random(0.5))
        .bias(BIAS)
        .causal(true);
    case.call(&case.inputs())
}

/// Checks that both passes refuse a change of a good call, with the same kind of error.
fn refuses<E: MaskedEngine>(
    engine: &E,
    what: &str,
    change: impl Fn(&mut MaskedCall),
    expected: impl Fn(&Error) -> bool,
) {
    let mut call = good();
    change(&mut call);
    assert_refused(what, E::NAME, engine.masked_forward(&call), &expected);
    assert_refused(what, E::NAME, engine.masked(&call), &expected);
}

type Field = fn(&mut MaskedCall) -> &mut Raw;

const FIELDS: [(Name, Field); 4] = [
    (Name::Query, |c| &mut c.q),
    (Name::Key, |c| &mut c.k),
    (Name::Value, |c| &mut c.v),
    (Name::Bias, |c| c.bias.as_mut().expect("the call has one")),
];

/// One more on an axis, so that no size is 0; the strides reach it.
fn widen(raw: &mut Raw, axis: usize) {
    raw.shape[axis] += 1;
    raw.values.resize(100_000, 0.0);
}

/// Each tensor with an axis of another size than the problem's.
fn shapes<E: MaskedEngine>(engine: &E) {
    for (name, of) in FIELDS {
        for axis in 0..4 {
            let what = format!("{name} with axis {axis} off");
            let change = |call: &mut MaskedCall| widen(of(call), axis);
            refuses(engine, &what, change, refused::shape(name, axis));
        }
    }
}

/// True if an error is that of the shape or of the buffer of a tensor.
fn does_not_fit(name: Name) -> impl Fn(&Error) -> bool {
    let shape = move |e: &Error| matches!(e, Error::Shape { tensor, .. } if *tensor == name);
    move |e| shape(e) || refused::buffer(name)(e)
}

/// Plans of masks that broadcast on other axes, and of other lengths: bits of another shape.
fn plans<E: MaskedEngine>(engine: &E) {
    let [b, h, q, k] = MASK;
    for (mask, lengths) in [
        ([1, h, q, k], [q, k]),
        ([b, 4, q, k], [q, k]),
        ([b, h, 1, k], [q, k]),
        ([b, h, q, 1], [q, k]),
        ([b, h, q + 7, k], [q + 7, k]),
        ([b, h, q, k + 64], [q, k + 64]),
    ] {
        let what = format!("the plan of {mask:?} for {lengths:?}");
        let change = |call: &mut MaskedCall| {
            let shown = vec![1.0; mask.iter().product()];
            let raw = Raw::new(&shown, &mask, F32, Layout::Contiguous);
            call.plan = Some(PlanGeometry::new(&mask, lengths, true).expect("a good plan"));
            call.mask = Some(raw);
        };
        refuses(engine, &what, change, does_not_fit(Name::Plan));
    }
}

fn strides<E: MaskedEngine>(engine: &E) {
    for (name, of) in &FIELDS[..3] {
        let swap = |call: &mut MaskedCall| of(call).strides.swap(2, 3);
        refuses(engine, "swapped axes", swap, refused::strides(*name));
    }
    // The strides of a bias are free, but must stay within its buffer.
    let gap = |call: &mut MaskedCall| call.bias.as_mut().expect("a bias").strides[3] = 2;
    let is_bias = refused::buffer(Name::Bias);
    refuses(engine, "a bias with gaps between the keys", gap, is_bias);
}

fn short_buffers<E: MaskedEngine>(engine: &E) {
    for (name, of) in FIELDS {
        let what = format!("{name} cut off");
        let cut = |call: &mut MaskedCall| of(call).values.truncate(20);
        refuses(engine, &what, cut, refused::buffer(name));
    }
    let (cut, result) = (|call: &mut MaskedCall| call.missing = 1, Name::GradBias);
    refuses(engine, "results cut off", cut, refused::result(result));
}

/// Masks that do not fit their own plan, and calls with a superfluous or a missing mask.
fn masks<E: MaskedEngine>(engine: &E) {
    let counts = |change: &dyn Fn(&mut MaskedCall)| {
        let mut call = good();
        change(&mut call);
        engine.counts(&call)
    };
    for axis in 0..4 {
        let what = format!("a mask with axis {axis} off");
        let off = counts(&|call| widen(mask_of(call), axis));
        assert_refused(&what, E::NAME, off, refused::shape(Name::Mask, axis));
    }
    let short = counts(&|call| mask_of(call).values.truncate(20));
    let [is_mask, is_plan] = [Name::Mask, Name::Plan].map(refused::buffer);
    assert_refused("a mask cut off", E::NAME, short, is_mask);
    let short = counts(&|call| call.missing = 1);
    assert_refused("a plan cut off", E::NAME, short, is_plan);
    refuses(engine, "no mask", |call| call.mask = None, is_plan);
    let unplanned = |call: &mut MaskedCall| call.problem.plan = None;
    refuses(engine, "a mask too many", unplanned, is_plan);
}

fn mask_of(call: &mut MaskedCall) -> &mut Raw {
    call.mask.as_mut().expect("the call has one")
}

fn biases<E: MaskedEngine>(engine: &E) {
    let is_bias = refused::buffer(Name::Bias);
    refuses(engine, "no bias", |call| call.bias = None, is_bias);
    let unexpected = |call: &mut MaskedCall| call.problem.bias = None;
    refuses(engine, "a bias too many", unexpected, is_bias);
    let mut call = good();
    (call.bias, call.problem.bias) = (None, None);
    let (result, is_gradient) = (engine.masked(&call), |e: &Error| *e == Error::BiasGradient);
    assert_refused("the gradient of no bias", E::NAME, result, is_gradient);
    for axis in 0..4 {
        let mut call = good();
        call.grad_bias.as_mut().expect("it is wanted")[axis] += 1;
        let what = format!("a gradient of the bias with axis {axis} off");
        let is_gradient = does_not_fit(Name::GradBias);
        assert_refused(&what, E::NAME, engine.masked(&call), is_gradient);
    }
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
fn wrong_ranks<E: MaskedEngine>(engine: &E) {
    let add_axis = |raw: &mut Raw| {
        raw.shape.insert(0, 1);
        raw.strides.insert(0, 0);
    };
    for (name, of) in FIELDS {
        let what = format!("{name} with one axis more");
        let change = |call: &mut MaskedCall| add_axis(of(call));
        refuses(engine, &what, change, refused::rank(name));
    }
    let mut call = good();
    add_axis(mask_of(&mut call));
    let (counts, is_mask) = (engine.counts(&call), refused::rank(Name::Mask));
    assert_refused("a mask", E::NAME, counts, is_mask);
}

/// The sizes other than 1 that an axis of a mask or a bias may have, by the shapes of the good call.
const SIZES: [&[usize]; 4] = [&[2], &[4, 2], &[9], &[70]];

/// The error of a shape that is off on one axis.
fn does_not_broadcast(tensor: Name, axis: usize, actual: usize) -> Error {
    Error::Broadcast {
        tensor,
        axis,
        sizes: SIZES[axis].to_vec(),
        actual,
    }
}

#[test]
fn a_problem_names_the_axis_that_does_not_broadcast() {
    let (q, kv) = ([2, 4, 9, 8], [2, 2, 70, 8]);
    let problem = |mask: Option<&[usize]>, bias: Option<&[usize]>| {
        let options = AttentionOptions::new();
        MaskedProblem::new(&q, &kv, &kv, mask, bias, F32, &options).unwrap_err()
    };
    for axis in 0..4 {
        for size in [0, 3, 71] {
            let mut shape = MASK;
            shape[axis] = size;
            let error = problem(Some(&shape), None);
            assert_eq!(error, does_not_broadcast(Name::Mask, axis, size));
            let error = problem(None, Some(&shape));
            assert_eq!(error, does_not_broadcast(Name::Bias, axis, size));
        }
    }
}

#[cfg(feature = "burn")]
fn shapes_that_do_not_broadcast<B: Backend>(burn: &Burn<B>) {
    for axis in 0..4 {
        for name in [Name::Mask, Name::Bias] {
            let mut call = good();
            let mut shape = MASK;
            shape[axis] = 3;
            let values = vec![0.0; shape.iter().product()];
            let raw = Raw::new(&values, &shape, F32, Layout::Contiguous);
            *(match name {
                Name::Mask => &mut call.mask,
                _ => &mut call.bias,
            }) = Some(raw);
            let expected = |e: &Error| *e == does_not_broadcast(name, axis, 3);
            let what = format!("{name} with axis {axis} off");
            assert_refused(&what, B::NAME, burn.masked_forward(&call), expected);
            assert_refused(&what, B::NAME, burn.masked(&call), expected);
        }
    }
}

/// Masks, plans and biases of another device than q's.
#[cfg(all(feature = "flex", feature = "cpu"))]
#[test]
fn tensors_of_two_devices_are_refused() {
    use burn::tensor::{Bool, Device, Tensor};
    use burn_flash_dma::{AttentionMask, MaskedAttention, TilePlan};
    let (here, there) = (Device::flex(), Device::cpu());
    let rows = |device| {
        [[1, 2, 5, 8], [1, 1, 7, 8], [1, 1, 7, 8]].map(|shape| Tensor::<4>::zeros(shape, device))
    };
    let options = AttentionOptions::new();
    let mask = |device| {
        let flags = burn::tensor::TensorData::new(vec![true; 35], [1, 1, 5, 7]);
        AttentionMask::visible(Tensor::<4, Bool>::from_data(flags, device))
    };
    for (device, other) in [(&here, &there), (&there, &here)] {
        let is = |name, error| assert_eq!(error, Error::Device { tensor: name });
        let [q, k, v] = rows(device);
        let result = MaskedAttention::new(q, k, v)
            .mask(mask(other))
            .options(options)
            .try_forward();
        is(Name::Mask, result.unwrap_err());
        let [q, k, v] = rows(device);
        let zeros = burn::tensor::TensorData::new(vec![0f32; 7], [1, 1, 1, 7]);
        let bias = Tensor::from_data(zeros, other);
        let result = MaskedAttention::new(q, k, v)
            .bias(bias)
            .options(options)
            .try_forward();
        is(Name::Bias, result.unwrap_err());
        let [q, k, v] = rows(device);
        let plan = TilePlan::new(mask(other), [5, 7], true);
        let attention = MaskedAttention::new(q, k, v).plan(&plan);
        let result = attention.options(options).try_forward();
        is(Name::Plan, result.unwrap_err());
    }
}

//! A mismatch is a typed error that names the tensor and the axis, and no result is written.

use flash_dma_problem::{
    AttentionError as Error, AttentionOptions, ElementType, MaskedProblem, PlanGeometry,
    TensorName as Name,
};
use flash_dma_tests::masked::{MaskedCall, MaskedCase, MaskedEngine, Pattern};
use flash_dma_tests::{Layout, Raw, Refused, kernel_engines, raw_engines};

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

/// Refuses a change of a good call in both passes, with the same kind of error.
fn refuses<E: MaskedEngine>(
    engine: &E,
    what: &str,
    change: impl Fn(&mut MaskedCall),
    expected: impl Fn(&Error) -> bool,
) {
    let mut call = good();
    change(&mut call);
    let backward = engine.masked(&call).map(|_| ());
    for result in [engine.masked_forward(&call).map(|_| ()), backward] {
        refused(what, E::NAME, result, &expected);
    }
}

fn refused(
    what: &str,
    engine: &str,
    result: Result<(), Refused>,
    expected: impl Fn(&Error) -> bool,
) {
    let Refused { error, written } = result.expect_err(what);
    assert!(expected(&error), "{engine} {what}: {error:?}");
    assert!(!written, "{engine} {what}: a result was written");
}

/// A tensor of a call.
type Field = fn(&mut MaskedCall) -> &mut Raw;

const FIELDS: [(Name, Field); 4] = [
    (Name::Query, |c| &mut c.q),
    (Name::Key, |c| &mut c.k),
    (Name::Value, |c| &mut c.v),
    (Name::Bias, |c| c.bias.as_mut().expect("the call has one")),
];

/// Each tensor with an axis of another size than the problem's.
fn shapes<E: MaskedEngine>(engine: &E) {
    for (name, of) in FIELDS {
        for axis in 0..4 {
            refuses(
                engine,
                &format!("{name} with axis {axis} off"),
                // One more, so that no size is 0; the strides reach it.
                |call| {
                    let raw = of(call);
                    raw.shape[axis] += 1;
                    raw.values.resize(100_000, 0.0);
                },
                |e| matches!(e, Error::Shape { tensor, axis: a, .. } if (*tensor, *a) == (name, axis)),
            );
        }
    }
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
        refuses(
            engine,
            &format!("the plan of {mask:?} for {lengths:?}"),
            |call| {
                let shown = vec![1.0; mask.iter().product()];
                call.plan = Some(PlanGeometry::new(&mask, lengths, true).expect("a good plan"));
                call.mask = Some(Raw::new(
                    &shown,
                    &mask,
                    ElementType::F32,
                    Layout::Contiguous,
                ));
            },
            |e| {
                matches!(
                    e,
                    Error::Shape {
                        tensor: Name::Plan,
                        ..
                    } | Error::Buffer {
                        tensor: Name::Plan,
                        ..
                    }
                )
            },
        );
    }
}

fn strides<E: MaskedEngine>(engine: &E) {
    for (name, of) in &FIELDS[..3] {
        refuses(
            engine,
            "swapped axes",
            |call| of(call).strides.swap(2, 3),
            |e| matches!(e, Error::Strides { tensor, .. } if tensor == name),
        );
    }
    // The strides of a bias are free, but must stay within its buffer.
    refuses(
        engine,
        "a bias with a gap between the keys",
        |call| call.bias.as_mut().expect("the call has one").strides[3] = 2,
        is_buffer(Name::Bias),
    );
}

fn short_buffers<E: MaskedEngine>(engine: &E) {
    for (name, of) in FIELDS {
        refuses(
            engine,
            &format!("{name} cut off"),
            |call| of(call).values.truncate(20),
            is_buffer(name),
        );
    }
    let results = [
        Name::Out,
        Name::Lse,
        Name::GradQuery,
        Name::GradKey,
        Name::GradValue,
        Name::GradBias,
    ];
    refuses(
        engine,
        "results cut off",
        |call| call.missing = 1,
        |e| matches!(e, Error::Buffer { tensor, .. } if results.contains(tensor)),
    );
}

/// Whether an error says that a buffer of this name is too short, or present against the problem.
fn is_buffer(name: Name) -> impl Fn(&Error) -> bool + Copy {
    move |e| matches!(e, Error::Buffer { tensor, .. } if *tensor == name)
}

/// Masks that do not fit their own plan, and calls with a superfluous or a missing mask.
fn masks<E: MaskedEngine>(engine: &E) {
    let refuses_mask =
        |what: &str, change: &dyn Fn(&mut MaskedCall), expected: &dyn Fn(&Error) -> bool| {
            let mut call = good();
            change(&mut call);
            refused(what, E::NAME, engine.counts(&call).map(|_| ()), expected);
        };
    for axis in 0..4 {
        refuses_mask(
            &format!("a mask with axis {axis} off"),
            &|call| {
                let mask = call.mask.as_mut().expect("the call has one");
                mask.shape[axis] += 1;
                mask.values.resize(100_000, 0.0);
            },
            &|e| matches!(e, Error::Shape { tensor: Name::Mask, axis: a, .. } if *a == axis),
        );
    }
    refuses_mask(
        "a mask cut off",
        &|call| {
            call.mask
                .as_mut()
                .expect("the call has one")
                .values
                .truncate(20)
        },
        &is_buffer(Name::Mask),
    );
    refuses_mask(
        "a plan cut off",
        &|call| call.missing = 1,
        &is_buffer(Name::Plan),
    );
    let is_plan = is_buffer(Name::Plan);
    refuses(engine, "no mask", |call| call.mask = None, is_plan);
    refuses(
        engine,
        "a mask too many",
        |call| call.problem.plan = None,
        is_plan,
    );
}

fn biases<E: MaskedEngine>(engine: &E) {
    let is_bias = is_buffer(Name::Bias);
    refuses(engine, "no bias", |call| call.bias = None, is_bias);
    refuses(
        engine,
        "a bias too many",
        |call| call.problem.bias = None,
        is_bias,
    );
    let backward =
        |what: &str, change: &dyn Fn(&mut MaskedCall), expected: &dyn Fn(&Error) -> bool| {
            let mut call = good();
            change(&mut call);
            refused(what, E::NAME, engine.masked(&call).map(|_| ()), expected);
        };
    backward(
        "the gradient of no bias",
        &|call| (call.bias, call.problem.bias) = (None, None),
        &|e| matches!(e, Error::BiasGradient),
    );
    for axis in 0..4 {
        backward(
            &format!("a gradient of the bias with axis {axis} off"),
            &|call| call.grad_bias.as_mut().expect("it is wanted")[axis] += 1,
            &|e| {
                matches!(
                    e,
                    Error::Shape {
                        tensor: Name::GradBias,
                        ..
                    } | Error::Buffer {
                        tensor: Name::GradBias,
                        ..
                    }
                )
            },
        );
    }
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
fn wrong_ranks<E: MaskedEngine>(engine: &E) {
    let add_axis = |raw: &mut Raw| {
        raw.shape.insert(0, 1);
        raw.strides.insert(0, 0);
    };
    for (name, of) in FIELDS {
        refuses(
            engine,
            &format!("{name} with one axis more"),
            |call| add_axis(of(call)),
            |e| matches!(e, Error::Rank { tensor, .. } if *tensor == name),
        );
    }
    let mut call = good();
    add_axis(call.mask.as_mut().expect("the call has one"));
    let is_mask = |e: &Error| {
        matches!(
            e,
            Error::Rank {
                tensor: Name::Mask,
                ..
            }
        )
    };
    refused("a mask", E::NAME, engine.counts(&call).map(|_| ()), is_mask);
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
        MaskedProblem::new(&q, &kv, &kv, mask, bias, ElementType::F32, &options).unwrap_err()
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
fn shapes_that_do_not_broadcast<B: flash_dma_tests::engines::Backend>(
    burn: &flash_dma_tests::engines::Burn<B>,
) {
    for axis in 0..4 {
        for name in [Name::Mask, Name::Bias] {
            let mut call = good();
            let mut shape = MASK;
            shape[axis] = 3;
            let values = vec![0.0; shape.iter().product()];
            let raw = Raw::new(&values, &shape, ElementType::F32, Layout::Contiguous);
            *(match name {
                Name::Mask => &mut call.mask,
                _ => &mut call.bias,
            }) = Some(raw);
            let expected = |e: &Error| *e == does_not_broadcast(name, axis, 3);
            let what = format!("{name} with axis {axis} off");
            refused(
                &what,
                B::NAME,
                burn.masked_forward(&call).map(|_| ()),
                expected,
            );
            refused(&what, B::NAME, burn.masked(&call).map(|_| ()), expected);
        }
    }
}

/// Masks, plans and biases of another device than q's.
#[cfg(all(feature = "flex", feature = "cpu"))]
#[test]
fn tensors_of_two_devices_are_refused() {
    use burn::tensor::{Bool, Device, Tensor};
    use burn_flash_dma::{AttentionMask, MaskedAttention, TilePlan, try_masked_attention};
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
        let result = try_masked_attention(q, k, v, Some(mask(other)), None, options);
        is(Name::Mask, result.unwrap_err());
        let [q, k, v] = rows(device);
        let bias = Tensor::from_data(
            burn::tensor::TensorData::new(vec![0f32; 7], [1, 1, 1, 7]),
            other,
        );
        let result = try_masked_attention(q, k, v, None, Some(bias), options);
        is(Name::Bias, result.unwrap_err());
        let [q, k, v] = rows(device);
        let plan = TilePlan::new(mask(other), [5, 7], true);
        let attention = MaskedAttention::new(q, k, v).plan(&plan);
        let result = attention.options(options).try_forward();
        is(Name::Plan, result.unwrap_err());
    }
}

//! A mismatch is a typed error, and no result is written.

use flash_dma_problem::{AttentionError as Error, ElementType, TensorName as Name};
use flash_dma_reference::generate;
use flash_dma_tests::{Call, Case, Engine, Layout, Raw, Refused, kernel_engines, raw_engines};

raw_engines!(
    shapes,
    strides,
    short_buffers,
    scores_and_intervals,
    windows_of_no_keys
);

// The CPU engine's views have their rank in their type.
kernel_engines!(wrong_ranks);

/// Refuses a change of a good call in both passes, with the same kind of error.
fn refuses<E: Engine>(
    engine: &E,
    what: &str,
    change: impl Fn(&mut Call),
    expected: impl Fn(&Error) -> bool,
) {
    let inputs = Case::new(9, 7).heads(4, 2).inputs();
    let (grad_out, grad_lse) = generate::gradients(&inputs.problem, 1);
    let mut call = engine.call(&inputs, Layout::Contiguous, (&grad_out, Some(&grad_lse)));
    change(&mut call);
    let backward = engine.backward(&call).map(|_| ());
    for result in [engine.forward(&call).map(|_| ()), backward] {
        let Refused { error, written } = result.expect_err(what);
        assert!(expected(&error), "{} {what}: {error:?}", E::NAME);
        assert!(!written, "{} {what}: a result was written", E::NAME);
    }
}

/// Each tensor with an axis of another size than the problem's.
fn shapes<E: Engine>(engine: &E) {
    for axis in 0..4 {
        for (name, of) in [
            (
                Name::Query,
                (|c: &mut Call| &mut c.q) as fn(&mut Call) -> &mut Raw,
            ),
            (Name::Key, |c| &mut c.k),
            (Name::Value, |c| &mut c.v),
        ] {
            refuses(
                engine,
                &format!("{name} with axis {axis} off"),
                |call| of(call).shape[axis] -= 1,
                |e| matches!(e, Error::Shape { tensor, axis: a, .. } if (*tensor, *a) == (name, axis)),
            );
        }
    }
    refuses(
        engine,
        "scores of too few heads",
        |call| call.scores.as_mut().expect("scored").shape[1] = 1,
        |e| {
            matches!(
                e,
                Error::Shape {
                    tensor: Name::Scores,
                    axis: 1,
                    expected: 2,
                    actual: 1
                }
            )
        },
    );
}

fn strides<E: Engine>(engine: &E) {
    for (name, of) in [
        (
            Name::Query,
            (|c: &mut Call| &mut c.q) as fn(&mut Call) -> &mut Raw,
        ),
        (Name::Key, |c| &mut c.k),
        (Name::Value, |c| &mut c.v),
    ] {
        let is_refused = |e: &Error| matches!(e, Error::Strides { tensor, .. } if *tensor == name);
        refuses(
            engine,
            "swapped axes",
            |call| of(call).strides.swap(2, 3),
            is_refused,
        );
    }
    refuses(
        engine,
        "scores with a gap between the keys",
        |call| {
            let scores = call.scores.as_mut().expect("scored");
            scores.strides[2] = 2;
            scores.values = vec![0.0; 1000];
        },
        |e| {
            matches!(
                e,
                Error::Strides {
                    tensor: Name::Scores,
                    ..
                }
            )
        },
    );
}

fn short_buffers<E: Engine>(engine: &E) {
    for (name, of) in [
        (
            Name::Query,
            (|c: &mut Call| &mut c.q.values) as fn(&mut Call) -> &mut Vec<f64>,
        ),
        (Name::Key, |c| &mut c.k.values),
        (Name::Value, |c| &mut c.v.values),
        (Name::Scores, |c| {
            &mut c.scores.as_mut().expect("scored").values
        }),
    ] {
        let is_refused = |e: &Error| matches!(e, Error::Buffer { tensor, .. } if *tensor == name);
        let cut = |call: &mut Call| of(call).truncate(20);
        refuses(engine, &format!("{name} cut off"), cut, is_refused);
    }
    refuses(
        engine,
        "results cut off",
        |call| call.missing = 1,
        |e| {
            matches!(
                e,
                Error::Buffer {
                    tensor: Name::Out
                        | Name::Lse
                        | Name::GradQuery
                        | Name::GradKey
                        | Name::GradValue
                        | Name::GradScores,
                    ..
                }
            )
        },
    );
}

fn scores_and_intervals<E: Engine>(engine: &E) {
    refuses(
        engine,
        "a scored problem without scores",
        |call| call.scores = None,
        |e| matches!(e, Error::ScoresWithoutIntervals),
    );
    refuses(
        engine,
        "scores for a plain problem",
        |call| call.problem = Case::new(9, 7).heads(4, 2).plain().problem(),
        |e| matches!(e, Error::ScoresWithoutIntervals),
    );
    refuses(
        engine,
        "too few intervals",
        |call| call.intervals.as_mut().expect("scored").truncate(5),
        |e| {
            matches!(
                e,
                Error::Buffer {
                    tensor: Name::Intervals,
                    ..
                }
            )
        },
    );
}

fn windows_of_no_keys<E: Engine>(engine: &E) {
    let scores = Raw::new(&[1.0; 12], &[1, 2, 6], ElementType::F32, Layout::Contiguous);
    let refused = engine.select(&scores, 0).expect_err("a window of no keys");
    assert!(
        matches!(refused.error, Error::ZeroWindow),
        "{:?}",
        refused.error
    );
    assert!(!refused.written);
    let short = Raw {
        values: vec![1.0; 3],
        ..scores.clone()
    };
    let refused = engine.select(&short, 2).expect_err("a short buffer");
    assert!(matches!(
        refused.error,
        Error::Buffer {
            tensor: Name::Scores,
            ..
        }
    ));
    let gaps = Raw {
        strides: vec![24, 12, 2],
        values: vec![1.0; 24],
        ..scores
    };
    let refused = engine.select(&gaps, 2).expect_err("gaps between the keys");
    assert!(matches!(
        refused.error,
        Error::Strides {
            tensor: Name::Scores,
            ..
        }
    ));
    assert!(!refused.written);
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
fn wrong_ranks<E: Engine>(engine: &E) {
    for (name, of) in [
        (
            Name::Query,
            (|c: &mut Call| &mut c.q) as fn(&mut Call) -> &mut Raw,
        ),
        (Name::Key, |c| &mut c.k),
        (Name::Value, |c| &mut c.v),
        (Name::Scores, |c| c.scores.as_mut().expect("scored")),
    ] {
        let is_refused = |e: &Error| matches!(e, Error::Rank { tensor, .. } if *tensor == name);
        let add_axis = |call: &mut Call| {
            let raw = of(call);
            raw.shape.insert(0, 1);
            raw.strides.insert(0, 0);
        };
        refuses(
            engine,
            &format!("{name} with one axis more"),
            add_axis,
            is_refused,
        );
    }
}

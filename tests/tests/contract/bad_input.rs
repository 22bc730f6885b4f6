//! A mismatch is a typed error, and no result is written.

use crate::refused::{self, assert_refused};
use flash_dma_problem::{AttentionError as Error, TensorName as Name};
use flash_dma_tests::prelude::*;

raw_engines!(
    shapes,
    strides,
    short_buffers,
    scores_and_intervals,
    windows_of_no_keys
);

// The CPU engine's views have their rank in their type.
kernel_engines!(wrong_ranks);

/// Checks that both passes refuse a change of a good call, with the same kind of error.
fn refuses<E: Engine>(
    engine: &E,
    what: &str,
    change: impl Fn(&mut Call),
    expected: impl Fn(&Error) -> bool,
) {
    let inputs = Case::new(9, 7).heads(4, 2).inputs();
    let grads = Grads::random(&inputs.problem, 1);
    let mut call = engine.call(&inputs, Layout::Contiguous, &grads);
    change(&mut call);
    assert_refused(what, E::NAME, engine.forward(&call), &expected);
    assert_refused(what, E::NAME, engine.backward(&call), &expected);
}

type Field = fn(&mut Call) -> &mut Raw;

const ROWS: [(Name, Field); 3] = [
    (Name::Query, |c| &mut c.q),
    (Name::Key, |c| &mut c.k),
    (Name::Value, |c| &mut c.v),
];

const FIELDS: [(Name, Field); 4] = [
    ROWS[0],
    ROWS[1],
    ROWS[2],
    (Name::Scores, |c| c.scores.as_mut().expect("scored")),
];

/// Each tensor with an axis of another size than the problem's.
fn shapes<E: Engine>(engine: &E) {
    for axis in 0..4 {
        for (name, of) in ROWS {
            let what = format!("{name} with axis {axis} off");
            let cut = |call: &mut Call| of(call).shape[axis] -= 1;
            refuses(engine, &what, cut, refused::shape(name, axis));
        }
    }
    let error = Error::Shape {
        tensor: Name::Scores,
        axis: 1,
        expected: 2,
        actual: 1,
    };
    let one_head = |call: &mut Call| call.scores.as_mut().expect("scored").shape[1] = 1;
    refuses(engine, "scores of too few heads", one_head, |e| *e == error);
}

fn strides<E: Engine>(engine: &E) {
    for (name, of) in ROWS {
        let swap = |call: &mut Call| of(call).strides.swap(2, 3);
        refuses(engine, "swapped axes", swap, refused::strides(name));
    }
    let gap = |call: &mut Call| {
        let scores = call.scores.as_mut().expect("scored");
        scores.strides[2] = 2;
        scores.values = vec![0.0; 1000];
    };
    let of_scores = refused::strides(Name::Scores);
    refuses(engine, "scores with a gap between the keys", gap, of_scores);
}

fn short_buffers<E: Engine>(engine: &E) {
    for (name, of) in FIELDS {
        let cut = |call: &mut Call| of(call).values.truncate(20);
        let what = format!("{name} cut off");
        refuses(engine, &what, cut, refused::buffer(name));
    }
    let (cut, result) = (|call: &mut Call| call.missing = 1, Name::GradScores);
    refuses(engine, "results cut off", cut, refused::result(result));
}

fn scores_and_intervals<E: Engine>(engine: &E) {
    let unpaired = |e: &Error| *e == Error::ScoresWithoutIntervals;
    let none = |call: &mut Call| call.scores = None;
    refuses(engine, "a problem without its scores", none, unpaired);
    let plain = Case::new(9, 7).heads(4, 2).plain().problem();
    let superfluous = |call: &mut Call| call.problem = plain;
    refuses(engine, "scores of a plain problem", superfluous, unpaired);
    let cut = |call: &mut Call| call.intervals.as_mut().expect("scored").truncate(5);
    let is_short = refused::buffer(Name::Intervals);
    refuses(engine, "too few intervals", cut, is_short);
}

fn windows_of_no_keys<E: Engine>(engine: &E) {
    let scores = Raw::new(&[1.0; 12], &[1, 2, 6], F32, Layout::Contiguous);
    let none = engine.select(&scores, 0);
    assert_refused("no keys", E::NAME, none, |e| *e == Error::ZeroWindow);
    let short = Raw {
        values: vec![1.0; 3],
        ..scores.clone()
    };
    let (short, is_short) = (engine.select(&short, 2), refused::buffer(Name::Scores));
    assert_refused("a short buffer", E::NAME, short, is_short);
    let gaps = Raw {
        strides: vec![24, 12, 2],
        values: vec![1.0; 24],
        ..scores
    };
    let gaps = engine.select(&gaps, 2);
    assert_refused("gaps", E::NAME, gaps, refused::strides(Name::Scores));
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
fn wrong_ranks<E: Engine>(engine: &E) {
    for (name, of) in FIELDS {
        let add_axis = |call: &mut Call| {
            let raw = of(call);
            raw.shape.insert(0, 1);
            raw.strides.insert(0, 0);
        };
        let what = format!("{name} with one axis more");
        refuses(engine, &what, add_axis, refused::rank(name));
    }
}

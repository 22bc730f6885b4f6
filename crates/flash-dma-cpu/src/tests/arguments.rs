//! Bad arguments.

use super::*;
use flash_dma_problem::{Engine, EngineChoice};

#[test]
fn a_bad_argument_is_refused_and_nothing_is_written() {
    let of = |options| problem([1, 2, 1, 4, 4, 8], true, ElementType::F32, options);
    let p = of(AttentionOptions::new());
    let (q, kv, z) = (vec![1.0f32; 64], vec![1.0f32; 32], [0.5f32; 4]);
    let intervals = [Interval { first: 0, end: 0 }; 4];
    let good = Inputs {
        q: View::contiguous(&q, p.q_shape()),
        k: View::contiguous(&kv, p.kv_shape()),
        v: View::contiguous(&kv, p.kv_shape()),
        selection: Some(Selection {
            scores: View::contiguous(&z, p.scores_shape()),
            intervals: &intervals,
            learning: None,
        }),
    };
    let forward_error = |inputs: Inputs<'_, f32>, out_len: usize, lse_len: usize| {
        let (mut out, mut lse) = (vec![7.0; out_len], vec![7.0; lse_len]);
        let error = forward(&p, inputs, Outputs::new(&mut out, &mut lse)).unwrap_err();
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "{error}");
        error.to_string()
    };
    let text = "out needs 64 elements, but its buffer has 63";
    assert_eq!(forward_error(good, 63, 8), text);
    let text = "lse needs 8 elements, but its buffer has 9";
    assert_eq!(forward_error(good, 64, 9), text);
    type Change<'a> = &'a dyn Fn(&mut Inputs<'a, f32>);
    let changes: [(Change<'_>, &str); 6] = [
        (
            &|bad| bad.q.strides = [64, 32, 1, 4],
            "q must have a contiguous last axis",
        ),
        (&|bad| bad.k.data = &kv[1..], "k needs 32 elements"),
        (&|bad| bad.v.shape[2] = 3, "v must have size 4 on axis 2"),
        (&|bad| bad.v.strides[2] = usize::MAX, "v needs"),
        (&|bad| bad.selection = None, "scores and intervals"),
        (
            &|bad| bad.selection.as_mut().unwrap().intervals = &intervals[..3],
            "intervals needs 4",
        ),
    ];
    for (change, text) in changes {
        let mut bad = good;
        change(&mut bad);
        let error = forward_error(bad, 64, 8);
        assert!(error.contains(text), "{error}");
    }
    let forced = AttentionOptions::new().with_engine(EngineChoice::Only(Engine::Mma));
    let forced = of(forced);
    let (mut out, mut lse) = ([7.0; 64], [7.0; 8]);
    let error = forward(&forced, good, Outputs::new(&mut out, &mut lse)).unwrap_err();
    let text =
        "the mma kernels cannot run the forward pass: the backend of the device has no such engine";
    assert_eq!(error.to_string(), text);
    assert_eq!((out, lse), ([7.0; 64], [7.0; 8]));
    let halves = vec![f16::ONE; 64];
    let inputs = Inputs {
        q: View::contiguous(&halves, p.q_shape()),
        k: View::contiguous(&halves[..32], p.kv_shape()),
        v: View::contiguous(&halves[..32], p.kv_shape()),
        selection: good.selection,
    };
    let error = forward(&p, inputs, Outputs::new(&mut halves.clone(), &mut [0.0; 8])).unwrap_err();
    assert_eq!(error.to_string(), "q must be f32, but is f16");

    let (lse, short) = ([0.0f32; 8], [0.0f32; 7]);
    let of_lse = "the gradient of lse needs 8";
    let of_scores = "the gradient of scores needs 4";
    let no_buffer = "the gradient of scores needs a buffer";
    for (saved_lse, lse_rest, grad_lse, dz_len, text) in [
        (&short[..], None, None, Some(4), "lse needs 8"),
        (&lse, Some(&short[..]), None, Some(4), "lse_rest needs 8"),
        (&lse, None, Some(&short[..]), Some(4), of_lse),
        (&lse, None, None, Some(5), of_scores),
        (&lse, None, None, None, no_buffer),
    ] {
        let (mut dq, mut dk, mut dv) = (vec![7.0; 64], vec![7.0; 32], vec![7.0; 32]);
        let mut dz = vec![7.0; dz_len.unwrap_or(0)];
        let saved = Saved {
            out: good.q,
            residual: None,
            lse: saved_lse,
            lse_rest,
            grad_out: good.q,
            grad_lse,
        };
        let grads = Gradients {
            q: &mut dq,
            k: &mut dk,
            v: &mut dv,
            scores: dz_len.map(|_| &mut dz[..]),
            rank: None,
        };
        let error = backward(&p, good, saved, grads).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!([dq, dk, dv, dz].concat().iter().all(|&x| x == 7.0));
    }

    let mut untouched = intervals;
    let scores = View::contiguous(&z, [1, 1, 4]);
    let none = select(scores, 0, &mut untouched);
    assert_eq!(none, Err(AttentionError::ZeroWindow));
    assert!(select(scores, 1, &mut untouched[..3]).is_err());
    assert_eq!(untouched, intervals);
}

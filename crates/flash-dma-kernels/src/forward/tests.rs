//! The forward kernel against the oracle, on cubecl-cpu.

use crate::args::{Inputs, Outputs};
use crate::forward::Forward;
use crate::forward::launch::ScoredForward;
use crate::forward::merge::merge;
use crate::host::engine::Engine;
use crate::host::pass::{Config, Plan};
use crate::portable::blueprint::{Blueprint, Micro};
use crate::testing::{self, Output, Placement, client, problem, upload_inputs};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem, TensorName};
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{Scores, inputs};
use flash_dma_reference::{self as oracle};

const F32: ElementType = ElementType::F32;

fn forward(p: &Problem, given: &Inputs, out: &Output, lse: &Output) -> Result<(), AttentionError> {
    let (out, lse) = (out.binding(), lse.binding());
    p.plan_forward(&client(), given, None)?
        .run(Outputs::new(out, lse))
}

/// Runs the kernel (with a forced register tile, if any) and compares output and LSE with the oracle.
fn check(inputs: &oracle::Inputs, placement: Placement, micro: Option<Micro>) {
    let (p, client) = (&inputs.problem, client());
    let out = Output::new(&client, &p.q_shape(), p.element);
    let lse = Output::new(&client, &p.lse_shape(), F32);
    let given = upload_inputs(&client, inputs, placement);
    match micro {
        None => forward(p, &given, &out, &lse).unwrap(),
        Some(micro) => {
            let pass = ScoredForward {
                problem: p,
                inputs: &given,
                tuning: Default::default(),
            };
            let config = Config::Portable(Blueprint::with_micro(micro, p));
            let (out, lse) = (out.binding(), lse.binding());
            Plan::with(&client, Engine::Portable, config, pass)
                .and_then(|plan| plan.run(Outputs::new(out, lse)))
                .unwrap();
        }
    }
    let (exact, naive) = (inputs.forward(), inputs.naive_forward());
    let (out, lse) = (out.read(&client), lse.read(&client));
    let (shape, element) = (p.q_shape(), p.element);
    compare("out", &shape, &out, &exact.out, &naive.out, element, OUTPUT)
        .and_then(|_| compare_lse(&p.lse_shape(), &lse, &exact.lse))
        .unwrap_or_else(|failure| panic!("{failure}\n{p:?}, {placement:?}, {micro:?}"));
}

fn options() -> AttentionOptions {
    AttentionOptions::new()
}

fn dense(
    q: [usize; 4],
    kv: [usize; 2],
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    problem(q, kv, false, element, &options)
}

fn sparse(q: [usize; 4], kv: [usize; 2], element: ElementType, window: usize) -> Problem {
    problem(q, kv, true, element, &options().with_keep_window(window))
}

#[test]
fn plain_attention_matches_the_oracle() {
    for (seed, q, kv) in [
        (0, [2, 4, 37, 24], [2, 37]),
        (1, [1, 2, 5, 8], [1, 40]),
        (2, [1, 2, 40, 8], [1, 5]),
        (3, [1, 1, 1, 128], [1, 17]),
        (4, [1, 1, 17, 256], [1, 33]),
    ] {
        for causal in [true, false] {
            let p = dense(q, kv, F32, options().with_causal(causal));
            let inputs = inputs(p, Scores::Normal, 1.0, seed);
            check(&inputs, Placement::Contiguous, None);
        }
    }
}

#[test]
fn half_types_softcap_scale_and_strides_match_the_oracle() {
    let q = [2, 4, 19, 40];
    for (element, placement) in [
        (ElementType::F16, Placement::TokenMajor),
        (ElementType::Bf16, Placement::Gaps),
        (F32, Placement::TokenMajor),
        (F32, Placement::Gaps),
    ] {
        let options = options().with_softcap(2.0).with_scale(0.7);
        let p = dense(q, [1, 21], element, options);
        check(&inputs(p, Scores::Normal, 1.5, 7), placement, None);
    }
}

#[test]
fn cooperating_units_match_the_oracle() {
    testing::cooperating_units(&check);
}

#[test]
fn selected_keys_match_the_oracle_for_every_kind_of_scores() {
    testing::every_kind_of_scores(&check);
}

#[test]
fn fewer_and_more_queries_than_keys_match_the_oracle() {
    testing::fewer_and_more_queries(&check);
}

#[test]
fn dropout_and_alibi_match_the_oracle() {
    testing::dropout_and_alibi(&check);
}

#[test]
fn values_that_overflow_or_are_not_finite_reach_only_what_selects_them() {
    let p = sparse([1, 2, 40, 8], [1, 40], F32, 5);
    let mut large = inputs(p, Scores::Normal, 30.0, 1);
    check(&large, Placement::Contiguous, None);
    for (key, value) in [(3, f64::NAN), (12, f64::INFINITY), (20, f64::NEG_INFINITY)] {
        large.v[key * 8 + 1] = value;
        check(&large, Placement::Contiguous, None);
        large.k[key * 8 + 2] = value;
        check(&large, Placement::Contiguous, None);
    }
    large.q[21 * 8] = f64::NAN;
    check(&large, Placement::Contiguous, None);
    // Dense causal: the first rows do not see the key.
    let p = dense([1, 1, 40, 8], [1, 40], F32, options());
    let mut inputs = inputs(p, Scores::Normal, 1.0, 2);
    inputs.v[17 * 8] = f64::NAN;
    inputs.k[30 * 8] = f64::NAN;
    check(&inputs, Placement::Contiguous, None);
}

/// Parts of random outputs, among them parts without a key, rows without any, and NaN in one part of a row.
#[test]
fn merged_parts_are_weighted_by_their_lse() {
    let client = client();
    let none = f64::NEG_INFINITY;
    for (element, parts) in [(F32, 1), (F32, 3), (ElementType::Bf16, 7)] {
        let p = dense([2, 3, 5, 8], [1, 5], element, options());
        let (rows, dim) = (2 * 3 * 5, 8);
        let mut rng = oracle::Rng::new(parts as u64);
        let mut random =
            |n: usize| -> Vec<f64> { (0..n).map(|_| f64::from(rng.normal() as f32)).collect() };
        let mut out = random(parts * rows * dim);
        let mut lse: Vec<f64> = random(parts * rows).iter().map(|x| x * 10.0).collect();
        for part in 0..parts {
            let without = |row: &usize| *row == 4 || part != row % parts;
            for row in [4, 9, 20].into_iter().filter(without) {
                lse[part * rows + row] = none;
                out[(part * rows + row) * dim..][..dim].fill(0.0);
            }
        }
        // Logits of -1e9: the LSEs of all parts are the same number, and only their rounding errors tell the parts
        // apart.
        for part in 0..parts {
            lse[part * rows + 17] = -1e9;
        }
        let mut rest: Vec<f64> = random(parts * rows);
        lse[12] = f64::NAN;
        rest[12] = 0.0;
        out[12 * dim..][..dim].fill(f64::NAN);
        out[15 * dim + 3] = f64::NAN;
        let upload = |values: &[f64], shape: &[usize]| {
            testing::upload(&client, values, shape, F32, Placement::Contiguous)
        };
        let all = [parts * 2, 3, 5, 8];
        let given = || Outputs {
            lse_rest: Some(upload(&rest, &all[..3])),
            ..Outputs::new(upload(&out, &all), upload(&lse, &all[..3]))
        };
        let merged = Output::new(&client, &p.q_shape(), element);
        let merged_lse = Output::new(&client, &p.lse_shape(), F32);
        let residual = (p.residual_shape()).map(|shape| Output::new(&client, &shape, element));
        let merged_rest = Output::new(&client, &p.lse_shape(), F32);
        let outputs = Outputs {
            residual: residual.as_ref().map(Output::binding),
            lse_rest: Some(merged_rest.binding()),
            ..Outputs::new(merged.binding(), merged_lse.binding())
        };
        merge(&client, &p, parts, given(), &outputs);
        let turned = Output::new(&client, &p.q_shape(), element);
        let in_tokens = Outputs::new(turned.token_major(), merged_lse.binding());
        merge(&client, &p, parts, given(), &in_tokens);
        let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
        let (merged, merged_lse) = (merged.read(&client), merged_lse.read(&client));
        let turned = turned.read_token_major(&client);
        assert!(merged.iter().zip(&turned).all(same), "{parts} parts");
        let merged_rest = merged_rest.read(&client);
        let residual = residual.map(|residual| residual.read(&client));
        for row in 0..rows {
            let offset = if row == 17 { -1e9 } else { 0.0 };
            let weight = |at: usize| (lse[at] - offset + rest[at]).exp();
            let weights: Vec<f64> = (0..parts).map(|part| weight(part * rows + row)).collect();
            let sum: f64 = weights.iter().sum();
            let close = |got: f64, want: f64, error: f64| {
                let near = same((&got, &want)) || (got - want).abs() <= error;
                let what = format!("row {row} of {parts} parts");
                assert!(near, "{what}: {got} instead of {want}");
            };
            let (lse, rest) = (merged_lse[row], merged_rest[row]);
            match sum {
                0.0 => assert!(lse == none && rest == 0.0),
                _ => close(lse - offset + rest, sum.ln(), 1e-5),
            }
            // The rest is only the rounding error of the LSE.
            close(f64::from((lse + rest) as f32), lse, 0.0);
            for d in 0..dim {
                let value = |part: usize| weights[part] * out[(part * rows + row) * dim + d];
                let want = match sum {
                    0.0 => 0.0,
                    _ => (0..parts).map(value).sum::<f64>() / sum,
                };
                let rounding = if element == F32 { 1e-6 } else { 4e-3 };
                close(merged[row * dim + d], want, 1e-6 + rounding * want.abs());
                if let Some(residual) = &residual {
                    let both = merged[row * dim + d] + residual[row * dim + d];
                    close(both, want, 1e-6 + rounding * rounding * want.abs());
                }
            }
        }
    }
}

#[test]
fn rows_are_the_same_in_either_order_of_heads_and_tokens() {
    let client = client();
    for (element, sparse_keys) in [(F32, false), (ElementType::Bf16, true)] {
        let q = [2, 4, 37, 24];
        let p = match sparse_keys {
            false => dense(q, [2, 37], element, options()),
            true => sparse(q, [2, 37], element, 9),
        };
        let given = inputs(p, Scores::Normal, 1.0, 5);
        let given = upload_inputs(&client, &given, Placement::Contiguous);
        let [rows, turned] = [(); 2].map(|()| {
            let new = |_| Output::new(&client, &p.q_shape(), element);
            let residual = p.residual_shape().map(new);
            (new(p.q_shape()), residual)
        });
        let lse = Output::new(&client, &p.lse_shape(), F32);
        let run = |out: TensorBinding, residual: Option<TensorBinding>| {
            let outputs = Outputs {
                residual,
                ..Outputs::new(out, lse.binding())
            };
            p.plan_forward(&client, &given, None)
                .and_then(|plan| plan.run(outputs))
        };
        run(rows.0.binding(), rows.1.as_ref().map(Output::binding)).unwrap();
        let lse_of_rows = lse.read(&client);
        let of_turned = turned.1.as_ref().map(Output::token_major);
        run(turned.0.token_major(), of_turned).unwrap();
        assert!(lse.read(&client) == lse_of_rows);
        assert!(turned.0.read_token_major(&client) == rows.0.read(&client));
        if let (Some(rows), Some(turned)) = (&rows.1, &turned.1) {
            assert!(turned.read_token_major(&client) == rows.read(&client));
        }

        // Of both in one order, or not at all.
        if let Some(residual) = &rows.1 {
            let error = run(turned.0.token_major(), Some(residual.binding())).unwrap_err();
            let AttentionError::Strides { tensor, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(tensor, TensorName::Residual);
        }
    }
}

#[test]
fn empty_problems_are_defined() {
    let client = client();
    for (q_len, k_len) in [(5, 0), (0, 5), (0, 0)] {
        for scores in [false, true] {
            let p = problem([1, 2, q_len, 8], [1, k_len], scores, F32, &options());
            let out = Output::new(&client, &p.q_shape(), F32);
            let lse = Output::new(&client, &p.lse_shape(), F32);
            let inputs = inputs(p, Scores::Normal, 1.0, 0);
            let given = upload_inputs(&client, &inputs, Placement::Contiguous);
            forward(&p, &given, &out, &lse).unwrap();
            assert!(out.read(&client).iter().all(|&x| x == 0.0));
            assert!(lse.read(&client).iter().all(|&x| x == f64::NEG_INFINITY));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let client = client();
    let p = dense([1, 2, 5, 8], [1, 5], F32, options());
    let inputs = inputs(p, Scores::Normal, 1.0, 0);
    let lse = Output::new(&client, &p.lse_shape(), F32);
    let out = Output::new(&client, &p.q_shape(), F32);
    let run = |change: &dyn Fn(&mut Inputs)| {
        let mut given = upload_inputs(&client, &inputs, Placement::Contiguous);
        change(&mut given);
        forward(&p, &given, &out, &lse).unwrap_err()
    };
    let error = run(&|given| given.k.shape[2] = 4);
    assert!(matches!(error, AttentionError::Shape { axis: 2, .. }));
    let error = run(&|given| given.v.strides[3] = 2);
    assert!(matches!(error, AttentionError::Strides { .. }), "{error}");
    let error = run(&|given| given.q.strides[1] = 1000);
    assert!(matches!(error, AttentionError::Buffer { .. }), "{error}");
    assert!(out.read(&client).iter().all(|x| x.is_nan()));

    let mut strided = out.binding();
    strided.strides[1] = 48;
    let given = upload_inputs(&client, &inputs, Placement::Contiguous);
    let outputs = Outputs::new(strided, lse.binding());
    let error = (p
        .plan_forward(&client, &given, None)
        .and_then(|plan| plan.run(outputs)))
    .unwrap_err();
    assert!(matches!(error, AttentionError::Strides { .. }), "{error}");

    let p = sparse([1, 2, 5, 8], [1, 5], F32, 2);
    let given = upload_inputs(&client, &inputs, Placement::Contiguous);
    let error = forward(&p, &given, &out, &lse).unwrap_err();
    assert_eq!(error, AttentionError::ScoresWithoutIntervals);
}

//! The kernel against its definition in f64, on CubeCL's CPU runtime, and the program at a small size.
#![cfg(feature = "cpu")]

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::internals::tiles::{Blueprint, Micro};
use flash_dma_kernels::{
    AttentionError, AttentionOptions, ElementType, Inputs as DeviceInputs, Problem,
};
use flash_dma_problem::TensorName;
use flash_dma_reference::compare::compare_by;
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::select::selected;
use flash_dma_reference::{Exact, Inputs};
use own_kernel::{attention_mass, blueprint, exact_mass, forward_pass};
use raw_kernels::{Kind, download, empty};
use testing::Program;

#[path = "../../testing.rs"]
mod testing;

const OWN_KERNEL: Program = Program(env!("CARGO_BIN_EXE_own-kernel"));

fn client() -> Client {
    let device = cubecl::Device::cpu();
    device.expect("this build links the runtime").client()
}

fn problem(
    [q_len, k_len]: [usize; 2],
    head_dim: usize,
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    let (q, k) = ([2, 4, q_len, head_dim], [2, 2, k_len, head_dim]);
    Problem::new(&q, &k, &k, Some(&k[..3]), element, &options).expect("a valid problem")
}

/// Inputs of these lengths with random scores and a window of 4.
fn host(lengths: [usize; 2], seed: u64) -> Inputs {
    let problem = problem(lengths, 16, ElementType::F32, causal(4));
    generate::inputs(problem, Scores::Normal, 1.0, seed)
}

fn causal(window: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(window)
}

fn mass(client: &Client, host: &Inputs) -> Vec<f64> {
    mass_with(client, host, |_, _| {})
}

/// The mass from a launch with changed inputs or blueprint.
fn mass_with(
    client: &Client,
    host: &Inputs,
    change: impl FnOnce(&mut DeviceInputs, &mut Blueprint),
) -> Vec<f64> {
    let (mut inputs, lse) = forward_pass(client, host).expect("valid inputs");
    let mass = empty(client, &host.problem.scores_shape(), Kind::F32);
    let mut blueprint = blueprint(client, &host.problem).expect("it fits");
    change(&mut inputs, &mut blueprint);
    attention_mass(client, &host.problem, &inputs, &lse, &mass, blueprint).expect("valid inputs");
    download(client, mass, Kind::F32)
}

/// The mass is f32 arithmetic on the given inputs, whatever their type, so only that error is allowed.
fn check(what: &str, client: &Client, host: &Inputs) {
    compare(what, host, &mass(client, host));
}

fn compare(what: &str, host: &Inputs, actual: &[f64]) {
    let (shape, exact) = (host.problem.scores_shape(), exact_mass(host));
    compare_by(what, &shape, actual, &exact, 0.0, ElementType::F32, 1.0)
        .unwrap_or_else(|failure| panic!("{failure}"));
}

// ANCHOR: definition
/// The attention mass by definition, `[batch, kv_heads, k_len]`: for each key, the sum of its probabilities over
/// every query of every head of its group.
fn by_definition(inputs: &Inputs) -> Vec<f64> {
    let p = &inputs.problem;
    let scores = inputs.scores.as_ref().expect("the problem has scores");
    let mut mass = vec![0.0; scores.len()];
    for head in 0..p.batch * p.q_heads {
        // Heads are numbered across sequences, so those of a group are neighbours.
        let first = head / (p.q_heads / p.kv_heads) * p.k_len;
        let scores = &scores[first..first + p.k_len];
        for i in 0..p.q_len {
            let keys = selected(scores, p.window, p.position(i));
            let logits = keys.iter().map(|&j| {
                let q = &inputs.q[(head * p.q_len + i) * p.head_dim..][..p.head_dim];
                let k = &inputs.k[(first + j) * p.head_dim..][..p.head_dim];
                let product: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                capped(p, f64::from(p.scale) * product) + scores[j]
            });
            let weights: Vec<f64> = logits.map(f64::exp).collect();
            let sum: f64 = weights.iter().sum();
            for (j, weight) in keys.into_iter().zip(weights) {
                mass[first + j] += weight / sum;
            }
        }
    }
    mass
}
// ANCHOR_END: definition

fn capped(problem: &Problem, logit: f64) -> f64 {
    let Some(cap) = problem.softcap.map(f64::from) else {
        return logit;
    };
    cap * (logit / cap).tanh()
}

#[test]
fn the_definition_is_the_gradient_of_v_where_all_gradients_of_out_are_one() {
    for (sizes, options) in [
        ([40, 40], causal(7)),
        ([13, 40], causal(7).with_softcap(2.0)),
        ([40, 13], causal(7)),
        ([13, 40], causal(7).with_causal(false)),
    ] {
        for scores in [Scores::Normal, Scores::Ties, Scores::Padded] {
            let problem = problem(sizes, 16, ElementType::F32, options);
            let host = generate::inputs(problem, scores, 1.0, 1);
            let Exact { values, .. } = exact_mass(&host);
            for (key, (a, b)) in by_definition(&host).iter().zip(&values).enumerate() {
                let error = (a - b).abs();
                assert!(error < 1e-12, "{sizes:?} {scores:?} {key}: {a} and {b}");
            }
        }
    }
}

// ANCHOR: kinds
#[test]
fn every_kind_of_scores_gives_the_mass_of_the_oracle() {
    let client = client();
    for (seed, scores) in Scores::ALL.into_iter().enumerate() {
        let problem = problem([67, 67], 24, ElementType::F32, causal(9));
        let host = generate::inputs(problem, scores, 1.0, seed as u64);
        check(&format!("{scores:?}"), &client, &host);
    }
}
// ANCHOR_END: kinds

// ANCHOR: units
#[test]
fn units_that_share_a_tile_give_the_same_mass_as_one_alone() {
    let client = client();
    let problem = problem([21, 33], 16, ElementType::F32, causal(9));
    let host = generate::inputs(problem, Scores::Normal, 1.0, 4);
    // On a CPU a unit works alone by default; four are as many threads, which spin at barriers.
    let micro = Micro {
        units_x: 2,
        units_y: 2,
        outer: 2,
        inner: 4,
    };
    let mass = mass_with(&client, &host, |_, blueprint| blueprint.micro = micro);
    compare("units", &host, &mass);
}
// ANCHOR_END: units

#[test]
fn options_lengths_and_element_types_give_the_mass_of_the_oracle() {
    use ElementType::{Bf16, F16, F32};
    let client = client();
    for (sizes, head_dim, element, options) in [
        ([5, 70], 32, F32, causal(9)),
        ([70, 5], 32, F32, causal(3)),
        ([21, 33], 32, F32, causal(9).with_causal(false)),
        ([33, 33], 32, F32, causal(9).with_softcap(1.5)),
        ([33, 33], 32, F32, causal(9).with_scale(0.5)),
        ([33, 33], 64, F16, causal(9)),
        ([33, 33], 64, Bf16, causal(33)),
    ] {
        let problem = problem(sizes, head_dim, element, options);
        let host = generate::inputs(problem, Scores::Normal, 1.0, 3);
        check(&format!("{problem:?}"), &client, &host);
    }
}

#[test]
fn every_query_that_sees_a_key_hands_out_one() {
    let client = client();
    let host = host([40, 30], 5);
    // The first ten queries of a head come before the first key.
    let expected = (host.problem.batch * host.problem.q_heads * 30) as f64;
    let total: f64 = mass(&client, &host).iter().sum();
    let error = (total - expected).abs();
    assert!(error < 1e-3, "{total} instead of {expected}");
}

#[test]
fn a_key_that_is_never_attended_leaves_no_trace() {
    let client = client();
    let mut host = host([40, 40], 6);
    host.scores.as_mut().expect("there are scores")[11] = f64::NEG_INFINITY;
    let clean = mass(&client, &host);
    host.k[11 * 16..12 * 16].fill(f64::NAN);
    let marked = mass(&client, &host);
    assert_eq!(marked[11], 0.0);
    assert_eq!(marked, clean);
}

#[test]
fn the_strides_of_q_and_k_do_not_matter() {
    let client = client();
    let host = host([20, 20], 7);
    let strided = mass_with(&client, &host, |inputs, _| {
        inputs.q = tokens_first(&client, &host.q, [2, 4, 20, 16]);
        inputs.k = tokens_first(&client, &host.k, [2, 2, 20, 16]);
    });
    assert_eq!(strided, mass(&client, &host));
}

/// The tensor with a token's heads together in memory, seen as `[batch, heads, len, head_dim]`.
fn tokens_first(client: &Client, values: &[f64], shape: [usize; 4]) -> TensorBinding {
    let [batch, heads, len, dim] = shape;
    let mut moved = Vec::with_capacity(values.len());
    for row in 0..batch * len * heads {
        let (b, i, h) = (row / heads / len, row / heads % len, row % heads);
        let at = ((b * heads + h) * len + i) * dim;
        moved.extend(values[at..at + dim].iter().map(|&x| x as f32));
    }
    let bytes: Vec<u8> = moved.into_iter().flat_map(f32::to_ne_bytes).collect();
    let buffer = client.create_from_slice(&bytes);
    let strides = [len * heads * dim, dim, heads * dim, 1].into_iter();
    let (strides, shape) = (strides.collect(), shape.into_iter().collect());
    // SAFETY: the buffer holds `batch * len * heads * dim` elements, which the strides reach once each.
    unsafe { TensorBinding::from_raw_parts(buffer, strides, shape) }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let client = client();
    let host = host([20, 20], 8);
    let problem = host.problem;
    let (inputs, lse) = forward_pass(&client, &host).expect("valid inputs");
    let mass = empty(&client, &problem.scores_shape(), Kind::F32);
    let blueprint = blueprint(&client, &problem).expect("it fits");
    let refused = |problem: &Problem, inputs, lse: &TensorBinding, mass| {
        let refused = attention_mass(&client, problem, inputs, lse, mass, blueprint);
        refused.expect_err("it does not fit")
    };
    let mut wide = inputs.clone();
    wide.k = inputs.q.clone();
    let error = refused(&problem, &wide, &lse, &mass);
    assert_eq!(error.to_string(), "k must have size 2 on axis 1, but has 4");
    let mut short = inputs.clone();
    short.q.handle = lse.handle.clone();
    let expected = AttentionError::Buffer {
        tensor: TensorName::Query,
        needed: 2560,
        actual: 160,
    };
    assert_eq!(refused(&problem, &short, &lse, &mass), expected);
    let mut gaps = lse.clone();
    gaps.strides[1] = 1;
    let (tensor, strides) = (TensorName::Lse, vec![80, 1, 1]);
    let expected = AttentionError::Strides { tensor, strides };
    assert_eq!(refused(&problem, &inputs, &gaps, &mass), expected);

    let small = empty(&client, &[2, 2, 19], Kind::F32);
    let error = refused(&problem, &inputs, &lse, &small);
    let message = "out must have size 20 on axis 2, but has 19";
    assert_eq!(error.to_string(), message);
    let (q, k) = (problem.q_shape(), problem.kv_shape());
    let plain = Problem::new(&q, &k, &k, None, ElementType::F32, &AttentionOptions::new());
    let error = refused(&plain.expect("a valid problem"), &inputs, &lse, &mass).to_string();
    assert!(error.contains("a mass without scores"), "{error}");
}

#[test]
fn without_queries_no_key_has_mass() {
    let client = client();
    let host = host([0, 20], 9);
    assert_eq!(mass(&client, &host), vec![0.0; 80]);
}

#[test]
fn the_program_agrees_with_f64_and_times_a_launch() {
    let text = OWN_KERNEL.printed("--length 48 --window 8 --launches 1", &[]);
    for line in [
        "all keys together: 192.000;",
        "against f64: worst error",
        "the keys of head 0 with the greatest mass:",
        "a launch: median",
    ] {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

#[test]
fn a_wrong_option_is_refused_by_name() {
    for (args, message) in [
        ("--size 48", "unexpected argument '--size'"),
        ("--launches 0", "0 is not in 1.."),
        ("--element f64", "[possible values: f32, f16, bf16]"),
        ("--device tpu", "[possible values: cpu, cuda]"),
        ("--head-dim 12", "head dimension 12 is not supported"),
    ] {
        let output = OWN_KERNEL.call(args, &[]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(message), "{text}");
    }
}

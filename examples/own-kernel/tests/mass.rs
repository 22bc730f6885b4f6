//! The kernel against its definition in f64, on CubeCL's CPU runtime.
#![cfg(feature = "cpu")]

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::internals::tiles::{Blueprint, Kernel, Micro};
use flash_dma_kernels::{AttentionError, AttentionOptions, ElementType, Problem};
use flash_dma_problem::TensorName;
use flash_dma_reference::compare::compare_by;
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Exact, Inputs};
use own_kernel::forward::forward_pass;
use own_kernel::launch::{MassError, attention_mass, attention_mass_in};
use own_kernel::oracle;
use own_kernel::tensors::{download, empty};

fn client() -> Client {
    cubecl::Device::cpu()
        .expect("this build links the runtime")
        .client()
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

fn causal(window: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(window)
}

fn run(client: &Client, host: &Inputs) -> Vec<f64> {
    let inputs = forward_pass(client, host).expect("valid inputs");
    let mass = empty(client, &host.problem.scores_shape(), 4);
    attention_mass(client, &host.problem, &inputs, &mass).expect("valid inputs");
    download(client, mass)
}

/// The mass is f32 arithmetic on the given inputs, whatever their type, so it is granted the error of that alone.
fn check(what: &str, client: &Client, host: &Inputs) {
    let (actual, exact) = (run(client, host), oracle::attention_mass(host));
    let shape = host.problem.scores_shape();
    compare_by(what, &shape, &actual, &exact, 0.0, ElementType::F32, 1.0)
        .unwrap_or_else(|failure| panic!("{failure}"));
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
            let Exact { values, .. } = oracle::attention_mass(&host);
            for (key, (a, b)) in oracle::by_definition(&host).iter().zip(&values).enumerate() {
                assert!(
                    (a - b).abs() < 1e-12,
                    "{sizes:?} {scores:?} {key}: {a} and {b}"
                );
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
    let inputs = forward_pass(&client, &host).expect("valid inputs");
    let hardware = &client.properties().hardware;
    let mut blueprint = Blueprint::choose(Kernel::Forward, &problem, hardware).expect("it fits");
    // On a CPU a unit works alone unless it is told otherwise; four are as many threads, which spin at barriers.
    let (units_x, units_y) = (2, 2);
    let (outer, inner) = (2, 4);
    blueprint.micro = Micro {
        units_x,
        units_y,
        outer,
        inner,
    };
    let mass = empty(&client, &problem.scores_shape(), 4);
    attention_mass_in(&client, &problem, &inputs, &mass, blueprint).expect("valid inputs");
    let (actual, exact) = (download(&client, mass), oracle::attention_mass(&host));
    let shape = problem.scores_shape();
    compare_by("mass", &shape, &actual, &exact, 0.0, ElementType::F32, 1.0).expect("in bounds");
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
    let problem = problem([40, 30], 16, ElementType::F32, causal(4));
    let host = generate::inputs(problem, Scores::Normal, 1.0, 5);
    // The first ten queries of a head stand before the first key.
    let expected = (problem.batch * problem.q_heads * 30) as f64;
    let total: f64 = run(&client, &host).iter().sum();
    assert!(
        (total - expected).abs() < 1e-3,
        "{total} instead of {expected}"
    );
}

#[test]
fn a_key_that_is_never_attended_leaves_no_trace() {
    let client = client();
    let problem = problem([40, 40], 16, ElementType::F32, causal(4));
    let mut host = generate::inputs(problem, Scores::Normal, 1.0, 6);
    host.scores.as_mut().expect("there are scores")[11] = f64::NEG_INFINITY;
    let clean = run(&client, &host);
    host.k[11 * 16..12 * 16].fill(f64::NAN);
    let mass = run(&client, &host);
    assert_eq!(mass[11], 0.0);
    assert_eq!(mass, clean);
}

#[test]
fn the_strides_of_q_and_k_do_not_matter() {
    let client = client();
    let problem = problem([20, 20], 16, ElementType::F32, causal(4));
    let host = generate::inputs(problem, Scores::Normal, 1.0, 7);
    let mut inputs = forward_pass(&client, &host).expect("valid inputs");
    for (tensor, values, heads) in [(&mut inputs.q, &host.q, 4), (&mut inputs.k, &host.k, 2)] {
        *tensor = tokens_first(&client, values, [2, heads, 20, 16]);
    }
    let mass = empty(&client, &problem.scores_shape(), 4);
    attention_mass(&client, &problem, &inputs, &mass).expect("valid inputs");
    assert_eq!(download(&client, mass), run(&client, &host));
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
    // SAFETY: the buffer holds `batch * len * heads * dim` elements, which the strides reach once each.
    unsafe {
        TensorBinding::from_raw_parts(
            client.create_from_slice(&bytes),
            [len * heads * dim, dim, heads * dim, 1]
                .into_iter()
                .collect(),
            shape.into_iter().collect(),
        )
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused_by_name() {
    let client = client();
    let problem = problem([20, 20], 16, ElementType::F32, causal(4));
    let host = generate::inputs(problem, Scores::Normal, 1.0, 8);
    let inputs = forward_pass(&client, &host).expect("valid inputs");
    let mass = empty(&client, &problem.scores_shape(), 4);
    let refused = |change: &dyn Fn(&mut own_kernel::launch::MassInputs)| {
        let mut inputs = inputs.clone();
        change(&mut inputs);
        attention_mass(&client, &problem, &inputs, &mass).expect_err("it does not fit")
    };
    let error = refused(&|inputs| inputs.k = inputs.q.clone());
    assert_eq!(error.to_string(), "k must have size 2 on axis 1, but has 4");
    let error = refused(&|inputs| inputs.lse.strides[1] = 1);
    let strides = vec![80, 1, 1];
    let tensor = TensorName::Lse;
    assert_eq!(error, AttentionError::Strides { tensor, strides }.into());
    let error = refused(&|inputs| inputs.q.handle = inputs.lse.handle.clone());
    let (tensor, needed, actual) = (TensorName::Query, 2560, 160);
    assert_eq!(
        error,
        AttentionError::Buffer {
            tensor,
            needed,
            actual
        }
        .into()
    );

    let small = empty(&client, &[2, 2, 19], 4);
    let error = attention_mass(&client, &problem, &inputs, &small).expect_err("it is too small");
    assert!(matches!(error, MassError::Mass { len: 76, .. }), "{error}");
    let (q, k) = (problem.q_shape(), problem.kv_shape());
    let plain = Problem::new(&q, &k, &k, None, ElementType::F32, &AttentionOptions::new());
    let plain = plain.expect("a valid problem");
    let error = attention_mass(&client, &plain, &inputs, &mass).expect_err("no scores");
    assert_eq!(error, MassError::NoScores);
}

#[test]
fn without_queries_no_key_has_mass() {
    let client = client();
    let problem = problem([0, 20], 16, ElementType::F32, causal(4));
    let host = generate::inputs(problem, Scores::Normal, 1.0, 9);
    assert_eq!(run(&client, &host), vec![0.0; 80]);
}

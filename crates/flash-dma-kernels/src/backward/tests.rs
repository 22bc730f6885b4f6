//! The backward kernels against the oracle, on cubecl-cpu.

use crate::args::{Gradients, Inputs, Saved};
use crate::backward::Backward;
use crate::backward::launch::{Blueprints, ScoredBackward};
use crate::host::engine::Engine;
use crate::host::pass::{Config, Plan};
use crate::portable::blueprint::{Blueprint, Micro};
use crate::testing::{self, Output, Placement, client, problem, upload, upload_inputs};
use cubecl::client::Client;
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem};
use flash_dma_reference::compare::{Exact, GRADIENT, compare};
use flash_dma_reference::generate::{Scores, gradients, inputs};
use flash_dma_reference::round::round;
use flash_dma_reference::{self as oracle};

const F32: ElementType = ElementType::F32;

struct Outputs {
    q: Output,
    k: Output,
    v: Output,
    scores: Option<Output>,
}

impl Outputs {
    fn new(client: &Client, p: &Problem) -> Self {
        let new = |shape: &[usize], element| Output::new(client, shape, element);
        Self {
            q: new(&p.q_shape(), p.element),
            k: new(&p.kv_shape(), p.element),
            v: new(&p.kv_shape(), p.element),
            scores: p.has_scores.then(|| new(&p.scores_shape(), F32)),
        }
    }

    fn bindings(&self) -> Gradients {
        Gradients {
            q: self.q.binding(),
            k: self.k.binding(),
            v: self.v.binding(),
            scores: self.scores.as_ref().map(Output::binding),
            rank: None,
        }
    }
}

/// The forward pass's saved results, from the oracle, and random incoming gradients.
struct Incoming {
    out: Vec<f64>,
    lse: Vec<f64>,
    grad_out: Vec<f64>,
    grad_lse: Option<Vec<f64>>,
}

impl Incoming {
    fn new(inputs: &oracle::Inputs, with_lse: bool) -> Self {
        let (grad_out, grad_lse) = gradients(&inputs.problem, 9);
        let forward = inputs.forward();
        Self {
            out: forward.out.values,
            lse: forward.lse.values,
            grad_out,
            grad_lse: with_lse.then_some(grad_lse),
        }
    }

    fn upload(&self, client: &Client, p: &Problem, placement: Placement) -> Saved {
        let rows = |values: &[f64]| upload(client, values, &p.q_shape(), p.element, placement);
        let row =
            |values: &[f64]| upload(client, values, &p.lse_shape(), F32, Placement::Contiguous);
        let lost = |&x: &f64| {
            if x.is_finite() {
                x - f64::from(x as f32)
            } else {
                0.0
            }
        };
        let rest: Vec<f64> = self.lse.iter().map(lost).collect();
        Saved {
            out: rows(&self.out),
            // As the forward pass writes it.
            residual: p.residual_shape().map(|_| {
                let lost = self.out.iter().map(|x| x - round(*x, p.element));
                rows(&lost.collect::<Vec<_>>())
            }),
            lse: row(&self.lse),
            lse_rest: Some(row(&rest)),
            grad_out: rows(&self.grad_out),
            grad_lse: self.grad_lse.as_deref().map(row),
        }
    }
}

fn backward(
    p: &Problem,
    given: &Inputs,
    saved: &Saved,
    grads: Gradients,
) -> Result<(), AttentionError> {
    p.plan_backward(&client(), given, saved, None)?.run(grads)
}

/// Runs the kernels (with a forced register tile, if any) and compares every gradient.
fn check_incoming(
    inputs: &oracle::Inputs,
    incoming: &Incoming,
    placement: Placement,
    micro: Option<Micro>,
) {
    let (p, client) = (&inputs.problem, client());
    let outputs = Outputs::new(&client, p);
    let given = upload_inputs(&client, inputs, placement);
    let saved = incoming.upload(&client, p, placement);
    match micro {
        None => backward(p, &given, &saved, outputs.bindings()).unwrap(),
        Some(micro) => {
            let blueprint = Blueprint::with_micro(micro, p);
            let config = Config::Portable(Blueprints {
                dq: blueprint,
                dkdv: blueprint,
            });
            let pass = ScoredBackward {
                problem: p,
                inputs: &given,
                saved: &saved,
            };
            Plan::with(&client, Engine::Portable, config, pass)
                .and_then(|plan| plan.run(outputs.bindings()))
                .unwrap();
        }
    }
    let grad_lse = incoming.grad_lse.as_deref();
    let exact = inputs.backward(&incoming.grad_out, grad_lse);
    let naive = inputs.naive_backward(&incoming.grad_out, grad_lse);
    let one = |name, shape: &[usize], output: &Output, exact: &Exact, naive: &[f64], element| {
        let actual = output.read(&client);
        compare(name, shape, &actual, exact, naive, element, GRADIENT)
            .unwrap_or_else(|failure| panic!("{failure}\n{p:?}, {placement:?}, {micro:?}"));
    };
    let (q, kv, element) = (p.q_shape(), p.kv_shape(), p.element);
    one("dq", &q, &outputs.q, &exact.q, &naive.q, element);
    one("dk", &kv, &outputs.k, &exact.k, &naive.k, element);
    one("dv", &kv, &outputs.v, &exact.v, &naive.v, element);
    if let (Some(output), Some(exact), Some(naive)) =
        (&outputs.scores, &exact.scores, &naive.scores)
    {
        one("dscores", &p.scores_shape(), output, exact, naive, F32);
    }
}

fn check(inputs: &oracle::Inputs, placement: Placement, micro: Option<Micro>) {
    check_incoming(inputs, &Incoming::new(inputs, true), placement, micro);
}

fn options() -> AttentionOptions {
    AttentionOptions::new()
}

fn sparse(q: [usize; 4], kv: [usize; 2], window: usize) -> Problem {
    problem(q, kv, true, F32, &options().with_keep_window(window))
}

#[test]
fn plain_gradients_match_the_oracle() {
    for (seed, q, kv) in [
        (0, [2, 4, 37, 24], [2, 37]),
        (1, [1, 2, 5, 8], [1, 40]),
        (2, [1, 2, 40, 8], [1, 5]),
        (3, [1, 1, 9, 256], [1, 11]),
    ] {
        for causal in [true, false] {
            let p = problem(q, kv, false, F32, &options().with_causal(causal));
            let inputs = inputs(p, Scores::Normal, 1.0, seed);
            let incoming = Incoming::new(&inputs, causal);
            check_incoming(&inputs, &incoming, Placement::Contiguous, None);
        }
    }
}

#[test]
fn half_types_softcap_scale_and_strides_match_the_oracle() {
    for (element, placement) in [
        (ElementType::F16, Placement::TokenMajor),
        (ElementType::Bf16, Placement::Gaps),
        (F32, Placement::Gaps),
    ] {
        for scores in [false, true] {
            let mut options = options().with_softcap(2.0).with_scale(0.7);
            options.keep_window = scores.then_some(6);
            let p = problem([2, 4, 19, 40], [1, 21], scores, element, &options);
            check(&inputs(p, Scores::Normal, 1.5, 7), placement, None);
        }
    }
}

#[test]
fn cooperating_units_match_the_oracle() {
    testing::cooperating_units(&check);
}

#[test]
fn gradients_match_the_oracle_for_every_kind_of_scores() {
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
    let p = sparse([1, 2, 40, 8], [1, 40], 5);
    let large = inputs(p, Scores::Normal, 30.0, 1);
    check(&large, Placement::Contiguous, None);
    for (key, value) in [(3, f64::NAN), (20, f64::INFINITY)] {
        let mut bad = inputs(p, Scores::Normal, 1.0, 1);
        bad.v[key * 8 + 1] = value;
        check(&bad, Placement::Contiguous, None);
        bad.k[key * 8 + 2] = value;
        check(&bad, Placement::Contiguous, None);
    }
    for dense in [false, true] {
        let p = match dense {
            false => p,
            true => problem([1, 2, 40, 8], [1, 40], false, F32, &options()),
        };
        let mut bad = inputs(p, Scores::Normal, 1.0, 2);
        bad.q[21 * 8] = f64::NAN;
        check(&bad, Placement::Contiguous, None);
        let good = inputs(p, Scores::Normal, 1.0, 2);
        let mut incoming = Incoming::new(&good, false);
        incoming.grad_out[30 * 8 + 3] = f64::NAN;
        check_incoming(&good, &incoming, Placement::Contiguous, None);
    }
}

#[test]
fn empty_problems_have_zero_gradients() {
    let client = client();
    for (q_len, k_len) in [(5, 0), (0, 5), (0, 0)] {
        for scores in [false, true] {
            let p = problem([1, 2, q_len, 8], [1, k_len], scores, F32, &options());
            let outputs = Outputs::new(&client, &p);
            let inputs = inputs(p, Scores::Normal, 1.0, 0);
            let zeros = vec![0.0; q_len * 16];
            let incoming = Incoming {
                out: zeros.clone(),
                lse: vec![f64::NEG_INFINITY; q_len * 2],
                grad_out: zeros,
                grad_lse: None,
            };
            let given = upload_inputs(&client, &inputs, Placement::Contiguous);
            let saved = incoming.upload(&client, &p, Placement::Contiguous);
            backward(&p, &given, &saved, outputs.bindings()).unwrap();
            let Outputs { q, k, v, scores } = outputs;
            for output in [q, k, v].into_iter().chain(scores) {
                assert!(output.read(&client).iter().all(|&x| x == 0.0));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let client = client();
    let p = sparse([1, 2, 5, 8], [1, 5], 2);
    let inputs = inputs(p, Scores::Normal, 1.0, 0);
    let incoming = Incoming::new(&inputs, true);
    let outputs = Outputs::new(&client, &p);
    let run = |change: &dyn Fn(&mut Saved, &mut Gradients)| {
        let given = upload_inputs(&client, &inputs, Placement::Contiguous);
        let mut saved = incoming.upload(&client, &p, Placement::Contiguous);
        let mut grads = outputs.bindings();
        change(&mut saved, &mut grads);
        backward(&p, &given, &saved, grads).unwrap_err()
    };
    let error = run(&|saved, _| saved.lse.shape[2] = 4);
    assert!(matches!(error, AttentionError::Shape { axis: 2, .. }));
    let error = run(&|saved, _| saved.grad_out.strides[3] = 2);
    assert!(matches!(error, AttentionError::Strides { .. }), "{error}");
    let error = run(&|_, grads| grads.k.strides[2] = 16);
    assert!(matches!(error, AttentionError::Strides { .. }), "{error}");
    let error = run(&|_, grads| grads.scores = None);
    assert_eq!(error, AttentionError::ScoresGradient);
    assert!(outputs.q.read(&client).iter().all(|x| x.is_nan()));
    assert!(outputs.k.read(&client).iter().all(|x| x.is_nan()));
}

//! Checks of selection, forward and backward pass before timing, by the oracle of samples and the suite's tolerance.

use super::buffers::Buffers;
use cubecl::client::Client;
use flash_dma_problem::ElementType;
use flash_dma_reference::compare::{GRADIENT, OUTPUT};
use flash_dma_reference::sampled::{Source, attended_keys, reader, spread};
use flash_dma_reference::{Failure, Report, Rng};

/// Maximum number of kv heads in a sample, and of query rows and keys in each of them.
const HEADS: usize = 8;
const ROWS: usize = 4;
const KEYS: usize = 8;

/// Calls `check` with the oracle of the inputs, and `out` and `lse` of the forward pass.
fn with_source(client: &Client, buffers: &Buffers, check: impl FnOnce(&Source, [&[f32]; 2])) {
    let problem = buffers.problem;
    let [q, k, v, grad_out] = buffers.rows.each_ref().map(|(_, host)| reader(host));
    let source = Source {
        problem,
        q: &q,
        k: &k,
        v: &v,
        scores: buffers.host_scores.as_deref(),
        grad_out: &grad_out,
        grad_lse: None,
    };
    let out = buffers.out.read_as(client, problem.element);
    let lse = buffers.lse.read_as(client, ElementType::F32);
    check(&source, [&out, &lse]);
}

fn passed(result: Result<Report, Failure>) {
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

/// Compares every interval with a heap's and sampled rows of `out` and `lse` with f64. Panics if a result is wrong.
pub fn check_forward(client: &Client, buffers: &Buffers) {
    let p = &buffers.problem;
    let intervals = buffers.read_intervals(client).unwrap_or_default();
    with_source(client, buffers, |source, [out, lse]| {
        for (head, got) in intervals.chunks(p.k_len).enumerate() {
            assert!(
                source.intervals(head) == got,
                "wrong intervals in row {head}"
            );
        }
        let rows = source.rows(&source.choose_rows(HEADS, ROWS, &mut Rng::new(11)));
        let shape = p.q_shape();
        passed((rows.out).compare("out", &shape, &reader(out), p.element, OUTPUT));
        passed(rows.lse.compare_lse(&p.lse_shape(), &reader(lse)));
    });
}

/// Compares sampled rows of every gradient with f64. The forward pass has been checked: the gradients of keys are
/// computed from its LSE and output. Panics if a result is wrong.
pub fn check_gradients(client: &Client, buffers: &Buffers) {
    let (p, f32) = (&buffers.problem, ElementType::F32);
    let [dq, dk, dv] = (buffers.grads.each_ref()).map(|grads| grads.read_as(client, p.element));
    let dz = (buffers.grad_scores.as_ref()).map(|grads| grads.read_as(client, f32));
    with_source(client, buffers, |source, [out, lse]| {
        let mut rng = Rng::new(13);
        let rows = source.rows(&source.choose_rows(HEADS, ROWS, &mut rng));
        let (q, kv, scores) = (p.q_shape(), p.kv_shape(), p.scores_shape());
        passed((rows.q).compare("dq", &q, &reader(&dq), p.element, GRADIENT));
        let heads = spread(p.batch * p.kv_heads, HEADS, &mut rng).into_iter();
        let keys = heads.map(|head| {
            let keys = attended_keys(&source.intervals(head), KEYS, &mut rng);
            source.keys(head, &keys, &reader(out), &reader(lse))
        });
        let keys = keys.reduce(|mut all, later| {
            all.append(later);
            all
        });
        let keys = keys.expect("there is a head");
        passed((keys.k).compare("dk", &kv, &reader(&dk), p.element, GRADIENT));
        passed((keys.v).compare("dv", &kv, &reader(&dv), p.element, GRADIENT));
        if let (Some(keys), Some(dz)) = (&keys.scores, &dz) {
            passed(keys.compare("dscores", &scores, &reader(dz), f32, GRADIENT));
        }
    });
}

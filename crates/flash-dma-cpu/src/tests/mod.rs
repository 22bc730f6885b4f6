//! The engine against the oracle: runs a case and compares every output.

mod arguments;
mod cases;

use crate::*;
use flash_dma_reference::Exact;
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare, compare_lse};
use half::{bf16, f16};

/// The engine's results for one problem, in f64.
#[derive(Clone, Debug)]
struct Results {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dz: Vec<f64>,
}

trait Tested: Element + Default + Into<f64> {}
impl Tested for f32 {}
impl Tested for f16 {}
impl Tested for bf16 {}

/// Narrows exactly representable values.
fn narrow<E: Tested>(x: &[f64]) -> Vec<E> {
    let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    let mut narrow = vec![E::default(); x.len()];
    E::round(&x, &mut narrow);
    narrow
}

fn wide<E: Tested>(x: &[E]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

/// Rows of heads with their layout.
struct Tensor<E> {
    data: Vec<E>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<E: Tested> Tensor<E> {
    /// Contiguous, or stored as `[b, n, h, d]` with gaps after every row.
    fn new(values: &[f64], shape: [usize; 4], strided: bool) -> Self {
        let mut data = narrow(values);
        let mut strides = View::contiguous(&data, shape).strides;
        if strided {
            let [b, h, n, d] = shape;
            let row = d + 3;
            strides = [h * n * row, row, h * row, 1];
            let rows = std::mem::replace(&mut data, narrow(&vec![f64::NAN; b * h * n * row]));
            for (r, values) in rows.chunks_exact(d).enumerate() {
                let to = r / n / h * strides[0] + r / n % h * strides[1] + r % n * strides[2];
                data[to..to + d].copy_from_slice(values);
            }
        }
        Self {
            data,
            shape,
            strides,
        }
    }

    fn view(&self) -> View<'_, E, 4> {
        View {
            data: &self.data,
            shape: self.shape,
            strides: self.strides,
        }
    }
}

/// Selection, forward and backward. Outputs start as NaN, so that an element left out shows.
fn engine<E: Tested>(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) -> Results {
    let p = &case.problem;
    let tensor = |x: &[f64], shape| Tensor::<E>::new(x, shape, strided);
    let q = tensor(&case.q, p.q_shape());
    let [k, v] = [&case.k, &case.v].map(|x| tensor(x, p.kv_shape()));
    let scores: Option<Vec<f32>> = case.scores.as_deref().map(narrow);
    let mut intervals = vec![Interval { first: 9, end: 9 }; scores.as_ref().map_or(0, Vec::len)];
    let selection = scores.as_ref().map(|scores| {
        let scores = View::contiguous(scores, p.scores_shape());
        select(scores, p.window, &mut intervals).unwrap();
        Selection {
            scores,
            intervals: &intervals,
            learning: None,
        }
    });
    let inputs = Inputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        selection,
    };
    let nan = |len: usize| narrow::<E>(&vec![f64::NAN; len]);
    let mut out = nan(case.q.len());
    let mut lse = vec![f32::NAN; case.q.len() / p.head_dim];
    let mut lse_rest = lse.clone();
    // Autodiff keeps the residual.
    let mut residual = p.residual_shape().map(|_| out.clone());
    let outputs = Outputs {
        out: &mut out,
        residual: residual.as_deref_mut(),
        lse: &mut lse,
        lse_rest: Some(&mut lse_rest),
    };
    forward(p, inputs, outputs).unwrap();

    let grad_out = tensor(grad_out, p.q_shape());
    let grad_lse: Option<Vec<f32>> = grad_lse.map(narrow);
    let [mut dq, mut dk, mut dv] = [&case.q, &case.k, &case.v].map(|x| nan(x.len()));
    let mut dz = vec![f32::NAN; scores.as_ref().map_or(0, Vec::len)];
    let saved = Saved {
        out: View::contiguous(&out, p.q_shape()),
        residual: (residual.as_ref()).map(|residual| View::contiguous(residual, p.q_shape())),
        lse: &lse,
        lse_rest: Some(&lse_rest),
        grad_out: grad_out.view(),
        grad_lse: grad_lse.as_deref(),
    };
    let grads = Gradients {
        q: &mut dq,
        k: &mut dk,
        v: &mut dv,
        scores: p.has_scores.then_some(&mut dz[..]),
        rank: None,
    };
    backward(p, inputs, saved, grads).unwrap();
    Results {
        out: wide(&out),
        lse: wide(&lse),
        dq: wide(&dq),
        dk: wide(&dk),
        dv: wide(&dv),
        dz: wide(&dz),
    }
}

fn run_engine(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) -> Results {
    let run = match case.problem.element {
        ElementType::F32 => engine::<f32>,
        ElementType::F16 => engine::<f16>,
        ElementType::Bf16 => engine::<bf16>,
    };
    run(case, grad_out, grad_lse, strided)
}

/// Compares every output with the oracle's, naming the case in a failure.
fn check(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) {
    let p = &case.problem;
    let got = run_engine(case, grad_out, grad_lse, strided);
    let (exact, naive) = (case.forward(), case.naive_forward());
    let exact_grad = case.backward(grad_out, grad_lse);
    let naive_grad = case.naive_backward(grad_out, grad_lse);
    let (q, kv, e) = (p.q_shape(), p.kv_shape(), p.element);
    let of_out = compare("out", &q, &got.out, &exact.out, &naive.out, e, OUTPUT);
    let mut results = vec![of_out, compare_lse(&p.lse_shape(), &got.lse, &exact.lse)];
    let mut gradient = |name, shape: &[usize], got: &[f64], exact: &Exact, naive: &[f64], e| {
        results.push(compare(name, shape, got, exact, naive, e, GRADIENT));
    };
    gradient("dq", &q, &got.dq, &exact_grad.q, &naive_grad.q, e);
    gradient("dk", &kv, &got.dk, &exact_grad.k, &naive_grad.k, e);
    gradient("dv", &kv, &got.dv, &exact_grad.v, &naive_grad.v, e);
    if let (Some(exact), Some(naive)) = (&exact_grad.scores, &naive_grad.scores) {
        let (shape, f32) = (p.scores_shape(), ElementType::F32);
        gradient("dz", &shape, &got.dz, exact, naive, f32);
    }
    let failures = results.into_iter().filter_map(Result::err);
    let failures: Vec<String> = failures.map(|failure| failure.to_string()).collect();
    assert!(failures.is_empty(), "{p:?}\n{}", failures.join("\n"));
}

fn problem(
    [b, hq, hkv, nq, nk, d]: [usize; 6],
    scores: bool,
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    let kv = [b, hkv, nk, d];
    let scores = scores.then_some(&kv[..3]);
    Problem::new(&[b, hq, nq, d], &kv, &kv, scores, element, &options).unwrap()
}

//! The engine against the oracle: runs a case and compares every output.

mod arguments;
mod cases;

use crate::*;
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare, compare_lse};
use half::{bf16, f16};

/// What the engine gives for one problem, in f64.
#[derive(Clone, Debug)]
struct Results {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dz: Vec<f64>,
}

/// Narrows exactly representable values.
fn narrow<E: Element + From32>(x: &[f64]) -> Vec<E> {
    x.iter().map(|&x| E::from32(x as f32)).collect()
}

trait From32: Element {
    fn from32(x: f32) -> Self;
    fn to64(self) -> f64;
}

impl From32 for f32 {
    fn from32(x: f32) -> Self {
        x
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

impl From32 for f16 {
    fn from32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

impl From32 for bf16 {
    fn from32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

fn wide<E: From32>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.to64()).collect()
}

/// A `[b, h, n, d]` tensor stored as `[b, n, h, d]` with gaps after every row, and its strides.
fn interleave<E: From32>(x: &[E], [b, h, n, d]: [usize; 4]) -> (Vec<E>, [usize; 4]) {
    let row = d + 3;
    let strides = [h * n * row, row, h * row, 1];
    let mut data = vec![E::from32(f32::NAN); b * h * n * row];
    for r in 0..b * h * n {
        let (b, h, n) = (r / n / h, r / n % h, r % n);
        let to = b * strides[0] + h * strides[1] + n * strides[2];
        data[to..to + d].copy_from_slice(&x[r * d..(r + 1) * d]);
    }
    (data, strides)
}

/// Selection, forward and backward. Outputs start as NaN: whatever is not written shows.
fn engine<E: From32>(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) -> Results {
    let p = &case.problem;
    let tensor = |x: &[f64], shape: [usize; 4]| -> (Vec<E>, [usize; 4]) {
        let x = narrow::<E>(x);
        if strided {
            return interleave(&x, shape);
        }
        let strides = View::contiguous(&x, shape).strides;
        (x, strides)
    };
    fn view<E>((data, strides): &(Vec<E>, [usize; 4]), shape: [usize; 4]) -> View<'_, E, 4> {
        View {
            data,
            shape,
            strides: *strides,
        }
    }
    let q = tensor(&case.q, p.q_shape());
    let k = tensor(&case.k, p.kv_shape());
    let v = tensor(&case.v, p.kv_shape());
    let scores: Option<Vec<f32>> =
        (case.scores.as_ref()).map(|z| z.iter().map(|&z| z as f32).collect());
    let mut intervals = vec![Interval { first: 9, end: 9 }; scores.as_ref().map_or(0, Vec::len)];
    let selection = scores.as_ref().map(|scores| {
        let scores = View::contiguous(scores, p.scores_shape());
        select(scores, p.window, &mut intervals).unwrap();
        Selection {
            scores,
            intervals: &intervals,
            far: None,
        }
    });
    let inputs = Inputs {
        q: view(&q, p.q_shape()),
        k: view(&k, p.kv_shape()),
        v: view(&v, p.kv_shape()),
        selection,
    };
    let nan = E::from32(f32::NAN);
    let mut out = vec![nan; case.q.len()];
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
    let grad_lse: Option<Vec<f32>> = grad_lse.map(|g| g.iter().map(|&g| g as f32).collect());
    let (mut dq, mut dk, mut dv) = (
        out.clone(),
        vec![nan; case.k.len()],
        vec![nan; case.v.len()],
    );
    dq.fill(nan);
    let mut dz = vec![f32::NAN; scores.as_ref().map_or(0, Vec::len)];
    let saved = Saved {
        out: View::contiguous(&out, p.q_shape()),
        residual: (residual.as_ref()).map(|residual| View::contiguous(residual, p.q_shape())),
        lse: &lse,
        lse_rest: Some(&lse_rest),
        grad_out: view(&grad_out, p.q_shape()),
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
    let (exact_grad, naive_grad) = (
        case.backward(grad_out, grad_lse),
        case.naive_backward(grad_out, grad_lse),
    );
    let (q, kv) = (p.q_shape(), p.kv_shape());
    let mut failures = Vec::new();
    let mut note = |result: Result<_, flash_dma_reference::Failure>| {
        if let Err(failure) = result {
            failures.push(failure.to_string());
        }
    };
    let e = p.element;
    note(compare(
        "out", &q, &got.out, &exact.out, &naive.out, e, OUTPUT,
    ));
    note(compare_lse(&p.lse_shape(), &got.lse, &exact.lse));
    note(compare(
        "dq",
        &q,
        &got.dq,
        &exact_grad.q,
        &naive_grad.q,
        e,
        GRADIENT,
    ));
    note(compare(
        "dk",
        &kv,
        &got.dk,
        &exact_grad.k,
        &naive_grad.k,
        e,
        GRADIENT,
    ));
    note(compare(
        "dv",
        &kv,
        &got.dv,
        &exact_grad.v,
        &naive_grad.v,
        e,
        GRADIENT,
    ));
    if let (Some(exact), Some(naive)) = (&exact_grad.scores, &naive_grad.scores) {
        let f32 = ElementType::F32;
        note(compare(
            "dz",
            &p.scores_shape(),
            &got.dz,
            exact,
            naive,
            f32,
            GRADIENT,
        ));
    }
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

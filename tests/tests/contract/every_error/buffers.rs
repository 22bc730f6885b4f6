//! Calls of the engines below Burn, which take buffers.

use super::calls::causal;
use burn_flash_dma::{AttentionError, ElementType, MaskedProblem, NormProblem, Problem};
use flash_dma_cpu::{self as cpu, Interval, MaskedGradients, MaskedInputs, View};

pub fn select_view(strides: [usize; 3], len: usize) -> Result<(), AttentionError> {
    let data = vec![0.0; len];
    let view = View {
        data: &data,
        shape: [2, 2, 7],
        strides,
    };
    let mut intervals = [Interval { first: 0, end: 0 }; 28];
    cpu::select(view, 3, &mut intervals)
}

/// A call of one key.
const SHAPE: [usize; 4] = [1, 1, 1, 8];

fn problem(scores: bool) -> Result<Problem, AttentionError> {
    let scores = scores.then_some(&SHAPE[..3]);
    Problem::new(&SHAPE, &SHAPE, &SHAPE, scores, ElementType::F32, &causal())
}

/// The saved results of a forward pass of the CPU engine.
fn saved<'a>(rows: View<'a, f32, 4>, lse: &'a [f32]) -> cpu::Saved<'a, f32> {
    cpu::Saved {
        out: rows,
        residual: None,
        lse,
        lse_rest: None,
        grad_out: rows,
        grad_lse: None,
    }
}

/// A backward pass of the CPU engine, with or without scores, their gradient and that of a rank without runners-up.
pub fn backward(scores: bool, gradient: bool, rank: bool) -> Result<(), AttentionError> {
    let (row, one) = ([0.0f32; 8], [0.0f32]);
    let rows = View::contiguous(&row, SHAPE);
    let intervals = [Interval { first: 0, end: 1 }];
    let inputs = cpu::Inputs {
        q: rows,
        k: rows,
        v: rows,
        selection: scores.then_some(cpu::Selection {
            scores: View::contiguous(&one, [1, 1, 1]),
            intervals: &intervals,
            learning: None,
        }),
    };
    let (mut q, mut k, mut v, mut z, mut of_rank) = (row, row, row, one, one);
    let grads = cpu::Gradients {
        q: &mut q,
        k: &mut k,
        v: &mut v,
        scores: gradient.then_some(&mut z),
        rank: rank.then_some(&mut of_rank),
    };
    cpu::backward(&problem(true)?, inputs, saved(rows, &one), grads)
}

/// A norm whose weight is missing, of the CPU engine.
pub fn a_norm_without_weight() -> Result<(), AttentionError> {
    let problem = NormProblem::rows(&[1, 8], &[8], ElementType::F32, 1e-5)?;
    let (x, mut out) = ([0.0f32; 8], [7.0; 8]);
    let parameters = cpu::NormParameters {
        gamma: None,
        table: None,
    };
    let x = View::contiguous(&x, problem.x_shape());
    let result = cpu::norm_forward(&problem, x, parameters, &mut out);
    assert_eq!(out, [7.0; 8]);
    result
}

/// A residual of outputs of f32, of the CPU engine and of the kernels.
pub fn a_residual_of_f32() -> Result<(), AttentionError> {
    let (row, mut out, mut residual, mut lse) = ([0.0f32; 8], [7.0; 8], [7.0; 8], [7.0]);
    let rows = View::contiguous(&row, SHAPE);
    let inputs = cpu::Inputs {
        q: rows,
        k: rows,
        v: rows,
        selection: None,
    };
    let outputs = cpu::Outputs {
        out: &mut out,
        residual: Some(&mut residual),
        lse: &mut lse,
        lse_rest: None,
    };
    let refused = cpu::forward(&problem(false)?, inputs, outputs);
    assert_eq!((out, residual, lse), ([7.0; 8], [7.0; 8], [7.0]));
    assert_eq!(kernels::residual(), refused);
    refused
}

pub fn a_gradient_of_no_bias() -> Result<(), AttentionError> {
    let (shape, f32) = (&SHAPE[..], ElementType::F32);
    let problem = MaskedProblem::new(shape, shape, shape, None, None, f32, &causal())?;
    let (row, one) = ([0.0f32; 8], [0.0f32]);
    let rows = View::contiguous(&row, SHAPE);
    let inputs = MaskedInputs {
        q: rows,
        k: rows,
        v: rows,
        bits: None,
        bias: None,
    };
    let (mut q, mut k, mut v, mut bias) = (row, row, row, one);
    let grads = MaskedGradients {
        q: &mut q,
        k: &mut k,
        v: &mut v,
        bias: Some(&mut bias),
    };
    cpu::masked_backward(&problem, inputs, saved(rows, &one), grads)
}

/// The kernels on CubeCL's CPU runtime.
pub mod kernels {
    use super::{AttentionError, Problem, SHAPE, problem};
    use cubecl::client::Client;
    use cubecl::server::Handle;
    use flash_dma_kernels::{self as engine, Forward as _};
    use flash_dma_tests::engines::contiguous;

    pub fn run(engine: engine::Engine) -> Result<(), AttentionError> {
        let client = client();
        let (problem, inputs, [out, lse]) = call(&client)?;
        let plan = problem.plan_forward(&client, &inputs, Some(engine))?;
        plan.run(outputs(&out, &lse))?;
        // Memory that nothing has ever written.
        let unwritten = client.empty(1 << 60);
        engine::check(&client, "this test", [&out, &lse])?;
        engine::check(&client, "this test", [&unwritten])
    }

    pub fn residual() -> Result<(), AttentionError> {
        let client = client();
        let (problem, inputs, [out, lse]) = call(&client)?;
        let outputs = outputs(&out, &lse);
        let outputs = engine::Outputs {
            residual: Some(outputs.out.clone()),
            ..outputs
        };
        problem.plan_forward(&client, &inputs, None)?.run(outputs)
    }

    fn client() -> Client {
        cubecl::Device::cpu().expect("the build has it").client()
    }

    fn call(client: &Client) -> Result<(Problem, engine::Inputs, [Handle; 2]), AttentionError> {
        let q = contiguous(&client.create_from_slice(&[0; 32]), &SHAPE);
        let inputs = engine::Inputs {
            q: q.clone(),
            k: q.clone(),
            v: q,
            selection: None,
        };
        Ok((problem(false)?, inputs, [(); 2].map(|()| client.empty(32))))
    }

    fn outputs(out: &Handle, lse: &Handle) -> engine::Outputs {
        engine::Outputs::new(contiguous(out, &SHAPE), contiguous(lse, &SHAPE[..3]))
    }
}

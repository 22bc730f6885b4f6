//! Inputs of one length, and a step of each implementation on them.

use super::Options;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Tensor, TensorData};
use flash_dma_cpu::{
    AttentionError, AttentionOptions, ElementType, Gradients, Inputs, Interval, Outputs, Problem,
    Saved, Selection, View,
};
use flash_dma_reference::Rng;
use std::hint::black_box;

/// The inputs of one length, for both.
pub struct Case {
    pub n: usize,
    q_shape: [usize; 4],
    kv_shape: [usize; 4],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    grad_out: Vec<f32>,
    pub scores: Vec<f32>,
    /// q, repeated k, repeated v and the gradient of the output, on Flex.
    flex: [Tensor<4>; 4],
}

/// Our outputs, allocated outside the timed region like Flex's inputs.
pub struct Buffers {
    intervals: Vec<Interval>,
    out: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    dz: Vec<f32>,
}

impl Buffers {
    pub fn new(case: &Case) -> Self {
        Self {
            intervals: vec![Interval { first: 0, end: 0 }; case.scores.len()],
            out: vec![0.0; case.q.len()],
            lse: vec![0.0; case.q.len() / case.q_shape[3]],
            dq: vec![0.0; case.q.len()],
            dk: vec![0.0; case.k.len()],
            dv: vec![0.0; case.v.len()],
            dz: vec![0.0; case.scores.len()],
        }
    }
}

impl Case {
    pub fn new(options: &Options, n: usize) -> Self {
        let mut rng = Rng::new(n as u64);
        let mut normal = |shape: &[usize]| -> Vec<f32> {
            let len = shape.iter().product();
            (0..len).map(|_| rng.normal() as f32).collect()
        };
        let q_shape = [1, options.q_heads, n, options.head_dim];
        let kv_shape = [1, options.kv_heads, n, options.head_dim];
        let (q, grad_out) = (normal(&q_shape), normal(&q_shape));
        let (k, v) = (normal(&kv_shape), normal(&kv_shape));
        let scores = normal(&kv_shape[..3]);
        let repeat = |x: &[f32]| -> Vec<f32> {
            let heads = x.chunks(n * options.head_dim);
            let group = options.q_heads / options.kv_heads;
            heads.flat_map(|head| head.repeat(group)).collect()
        };
        let flex = [q.clone(), repeat(&k), repeat(&v), grad_out.clone()]
            .map(|x| Tensor::from_data(TensorData::new(x, q_shape), &Device::flex()));
        Self {
            n,
            q_shape,
            kv_shape,
            q,
            k,
            v,
            grad_out,
            scores,
            flex,
        }
    }

    pub fn problem(&self, window: usize) -> Problem {
        Problem::new(
            &self.q_shape,
            &self.kv_shape,
            &self.kv_shape,
            Some(&self.kv_shape[..3]),
            ElementType::F32,
            &AttentionOptions::new().with_keep_window(window),
        )
        .expect("the sizes are valid")
    }

    /// Selection, forward and, if requested, backward of our engine.
    pub fn ours(
        &self,
        problem: &Problem,
        scores: &[f32],
        b: &mut Buffers,
        backward: bool,
    ) -> Result<(), AttentionError> {
        let scores = View::contiguous(scores, problem.scores_shape());
        flash_dma_cpu::select(scores, problem.window, &mut b.intervals)?;
        let inputs = Inputs {
            q: View::contiguous(&self.q, self.q_shape),
            k: View::contiguous(&self.k, self.kv_shape),
            v: View::contiguous(&self.v, self.kv_shape),
            selection: Some(Selection {
                scores,
                intervals: &b.intervals,
                learning: None,
            }),
        };
        let outputs = Outputs::new(&mut b.out, &mut b.lse);
        flash_dma_cpu::forward(problem, inputs, outputs)?;
        if !backward {
            return Ok(());
        }
        let saved = Saved {
            out: View::contiguous(&b.out, self.q_shape),
            residual: None,
            lse: &b.lse,
            lse_rest: None,
            grad_out: View::contiguous(&self.grad_out, self.q_shape),
            grad_lse: None,
        };
        let grads = Gradients {
            q: &mut b.dq,
            k: &mut b.dk,
            v: &mut b.dv,
            scores: Some(&mut b.dz),
            rank: None,
        };
        flash_dma_cpu::backward(problem, inputs, saved, grads)
    }

    /// Dense causal attention on Flex; with `backward` a step under autodiff.
    pub fn flex(&self, backward: bool) {
        if !backward {
            let [q, k, v, _] = self.flex.clone();
            black_box(dense(q, k, v));
            return;
        }
        let [q, k, v, grad_out] = self.flex.clone().map(|x| x.autodiff());
        let [q, k, v] = [q, k, v].map(|x| x.require_grad());
        let grads = (dense(q.clone(), k.clone(), v.clone()) * grad_out)
            .sum()
            .backward();
        black_box([q, k, v].map(|x| x.grad(&grads)));
    }

    /// Checks that our engine, with every key kept and zero scores, computes Flex's dense attention.
    pub fn check(&self) {
        let mut buffers = Buffers::new(self);
        let zeros = vec![0.0; self.scores.len()];
        self.ours(&self.problem(self.n), &zeros, &mut buffers, false)
            .expect("the arguments fit the problem");
        let [q, k, v, _] = self.flex.clone();
        let flex = dense(q, k, v).into_data();
        let flex = flex.try_to_vec::<f32>().expect("Flex computes in f32 here");
        let error = (flex.iter().zip(&buffers.out))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        let n = self.n;
        assert!(error < 1e-4, "the two disagree by {error} at N = {n}");
    }
}

/// Dense causal attention.
fn dense(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let options = AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    };
    attention(q, k, v, None, None, options)
}

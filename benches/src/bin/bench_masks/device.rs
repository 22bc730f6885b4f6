//! The buffers of a case on a device, the calls on them, and their check.

use crate::cases::{Case, Pattern};
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::TensorBinding;
use cubecl::server::{CopyDescriptor, Handle};
use flash_dma_benches::buffers::{device_time, engine_name};
use flash_dma_kernels::{
    AttentionOptions, Dropout, ElementType, MaskBits, MaskedGradients, MaskedInputs, MaskedProblem,
    Outputs, Saved, backward, contiguous_strides, forward, plan, plan_ranges,
};
use flash_dma_reference::Rng;
use half::bf16;

/// A timed call.
pub type Call = fn(&Calls, &Client);

/// The buffers of a case.
pub struct Calls {
    /// The fraction of visible pairs among those that causal masking leaves.
    pub density: f64,
    problem: MaskedProblem,
    pattern: Pattern,
    rows: [Vec<bf16>; 3],
    bias: Vec<f32>,
    mask: Option<Handle>,
    /// The first key and one past the last that each query sees, if it sees exactly the keys in between.
    ranges: Option<[Handle; 2]>,
    inputs: MaskedInputs,
    out: Handle,
    lse: Handle,
    /// Without the residual.
    saved: Saved,
    /// What the rounding of `out` loses, which a training step keeps.
    residual: TensorBinding,
    lse_rest: TensorBinding,
    grads: MaskedGradients,
}

/// Device time of a call, in milliseconds.
pub fn time(client: &Client, calls: &Calls, call: Call) -> f64 {
    device_time(client, || call(calls, client)).as_secs_f64() * 1e3
}

fn binding(handle: &Handle, shape: &[usize]) -> TensorBinding {
    TensorBinding {
        handle: handle.clone().binding(),
        strides: contiguous_strides(shape).collect(),
        shape: shape.to_vec().into(),
        tiling: Default::default(),
    }
}

impl Calls {
    /// Random inputs.
    pub fn new(client: &Client, case: &Case) -> Self {
        let (len, dim) = (case.len, case.head_dim);
        let (q, kv) = ([1, case.q_heads, len, dim], [1, case.kv_heads, len, dim]);
        let masked = !matches!(case.pattern, Pattern::Unmasked);
        let mask_shape = [1, 1, len, len];
        let bias_shape = case.bias.shape(case.q_heads, case.kv_heads, len);
        let dropout = case.dropout.map(|rate| Dropout::new(rate, 1));
        let options = AttentionOptions {
            dropout: dropout.transpose().expect("the table is valid"),
            ..AttentionOptions::new()
        };
        let problem = MaskedProblem::new(
            &q,
            &kv,
            &kv,
            masked.then_some(&mask_shape),
            bias_shape.as_ref().map(<[usize; 4]>::as_slice),
            ElementType::Bf16,
            &options,
        )
        .expect("the table is valid");
        let mut rng = Rng::new(7);
        let mut random = |shape: &[usize]| -> Vec<bf16> {
            (0..shape.iter().product::<usize>())
                .map(|_| bf16::from_f64(2.0 * rng.uniform() - 1.0))
                .collect()
        };
        let rows = [random(&q), random(&kv), random(&kv)];
        let grad_out = random(&q);
        // The mask takes its best keys from it as well.
        let biases = bias_shape.map_or(len, |shape| shape.iter().product());
        let bias: Vec<f32> = (0..biases).map(|_| rng.normal() as f32).collect();
        let upload = |values: &[bf16]| client.create_from_slice(bytemuck::cast_slice(values));
        let empty =
            |shape: &[usize], size: usize| client.empty(shape.iter().product::<usize>() * size);
        let mut visible = 0usize;
        let mask = masked.then(|| {
            let bytes = mask(case.pattern, len, &bias[..len], &mut rng);
            for (i, row) in bytes.chunks(len).enumerate() {
                visible += row[..=i].iter().map(|&x| usize::from(x)).sum::<usize>();
            }
            client.create_from_slice(&bytes)
        });
        let ranges = ranges(case.pattern, len)
            .map(|ranges| ranges.map(|keys| client.create_from_slice(bytemuck::cast_slice(&keys))));
        let pairs = len * (len + 1) / 2;
        let bits = problem.plan.map(|geometry| MaskBits {
            bits: binding(&empty(&geometry.bits_shape(), 4), &geometry.bits_shape()),
            counts: binding(
                &empty(&geometry.counts_shape(), 4),
                &geometry.counts_shape(),
            ),
        });
        let [qh, kh, vh] = rows.each_ref().map(|values| upload(values));
        let inputs = MaskedInputs {
            q: binding(&qh, &q),
            k: binding(&kh, &kv),
            v: binding(&vh, &kv),
            plan: bits,
            bias: bias_shape.map(|shape| {
                let handle = client.create_from_slice(bytemuck::cast_slice(&bias));
                binding(&handle, &shape)
            }),
        };
        let (out, lse) = (empty(&q, 2), empty(&q[..3], 4));
        let residual = problem.attention.residual_shape().expect("bf16 has one");
        let residual = binding(&empty(&residual, 2), &residual);
        // Zero before the first forward pass for a backward pass.
        let zeros = vec![0u8; q[..3].iter().product::<usize>() * 4];
        let lse_rest = binding(&client.create_from_slice(&zeros), &q[..3]);
        let saved = Saved {
            out: binding(&out, &q),
            residual: None,
            lse: binding(&lse, &q[..3]),
            lse_rest: Some(lse_rest.clone()),
            grad_out: binding(&upload(&grad_out), &q),
            grad_lse: None,
        };
        let grads = MaskedGradients {
            q: binding(&empty(&q, 2), &q),
            k: binding(&empty(&kv, 2), &kv),
            v: binding(&empty(&kv, 2), &kv),
            bias: bias_shape.map(|shape| binding(&empty(&shape, 4), &shape)),
        };
        Self {
            density: if masked {
                visible as f64 / pairs as f64
            } else {
                1.0
            },
            problem,
            pattern: case.pattern,
            rows,
            bias,
            mask,
            ranges,
            inputs,
            out,
            lse,
            saved,
            residual,
            lse_rest,
            grads,
        }
    }

    /// Each phase of the case with its engine.
    pub fn phases(&self, client: &Client) -> Vec<(&'static str, &'static str, Call)> {
        let (problem, inputs) = (&self.problem, &self.inputs);
        let forward = forward::plan(client, problem, inputs).expect("a valid call");
        let backward = backward::plan(client, problem, inputs, &self.saved).expect("a valid call");
        let mut phases: Vec<(_, _, Call)> = Vec::new();
        if self.mask.is_some() {
            phases.push(("plan", "portable", Self::plan));
        }
        if self.ranges.is_some() {
            phases.push(("plan-ranges", "portable", Self::plan_ranges));
        }
        let [forward, backward] = [forward.engine(), backward.engine()].map(engine_name);
        phases.push(("forward", forward, Self::forward));
        phases.push(("forward-residual", forward, Self::forward_with_residual));
        phases.push(("backward", backward, Self::backward));
        phases.push(("backward-residual", backward, Self::backward_with_residual));
        phases
    }

    fn plan(&self, client: &Client) {
        let (Some(mask), Some(bits), Some(geometry)) =
            (&self.mask, &self.inputs.plan, &self.problem.plan)
        else {
            return;
        };
        let mask = binding(mask, &geometry.mask);
        plan(client, geometry, mask, 1, false, bits.clone()).expect("a valid plan");
    }

    fn plan_ranges(&self, client: &Client) {
        let (Some(ranges), Some(bits), Some(geometry)) =
            (&self.ranges, &self.inputs.plan, &self.problem.plan)
        else {
            return;
        };
        let [first, end] = ranges
            .each_ref()
            .map(|keys| binding(keys, &[1, 1, geometry.q_len, 1]));
        plan_ranges(client, geometry, first, end, bits.clone()).expect("a valid plan");
    }

    /// The bits and counts that a call writes, over zeros.
    fn planned(&mut self, client: &Client, call: Call) -> [Vec<u8>; 2] {
        let plan = self.inputs.plan.as_mut().expect("there is a mask");
        for tensor in [&mut plan.bits, &mut plan.counts] {
            let zeros = vec![0u8; 4 * tensor.shape.iter().product::<usize>()];
            tensor.handle = client.create_from_slice(&zeros).binding();
        }
        call(self, client);
        let plan = self.inputs.plan.as_ref().expect("there is a mask");
        [&plan.bits, &plan.counts].map(|tensor| {
            let descriptor = CopyDescriptor {
                handle: tensor.handle.clone(),
                shape: tensor.shape.clone(),
                strides: tensor.strides.clone(),
                elem_size: 4,
            };
            client.read_one_unchecked_tensor(descriptor).to_vec()
        })
    }

    fn forward(&self, client: &Client) {
        self.launch_forward(client, false);
    }

    /// As a training step calls it.
    fn forward_with_residual(&self, client: &Client) {
        self.launch_forward(client, true);
    }

    fn launch_forward(&self, client: &Client, for_backward: bool) {
        let p = &self.problem.attention;
        let outputs = Outputs {
            out: binding(&self.out, &p.q_shape()),
            residual: for_backward.then(|| self.residual.clone()),
            lse: binding(&self.lse, &p.lse_shape()),
            lse_rest: for_backward.then(|| self.lse_rest.clone()),
        };
        forward::plan(client, &self.problem, &self.inputs)
            .and_then(|plan| plan.run(outputs))
            .expect("a valid call");
    }

    fn backward(&self, client: &Client) {
        self.launch_backward(client, &self.saved);
    }

    /// As a training step calls it.
    fn backward_with_residual(&self, client: &Client) {
        let saved = Saved {
            residual: Some(self.residual.clone()),
            ..self.saved.clone()
        };
        self.launch_backward(client, &saved);
    }

    fn launch_backward(&self, client: &Client, saved: &Saved) {
        backward::plan(client, &self.problem, &self.inputs, saved)
            .and_then(|plan| plan.run(self.grads.clone()))
            .expect("a valid call");
    }

    /// Builds the plan and the outputs that the phases read.
    pub fn prepare(&self, client: &Client) {
        self.plan(client);
        self.forward_with_residual(client);
        block_on(client.sync()).expect("the device works");
    }

    /// Builds the plan, in both ways where there are two, and compares sampled rows of a forward pass with f64.
    ///
    /// # Panics
    ///
    /// If a result is wrong.
    pub fn check(&mut self, client: &Client) {
        if self.ranges.is_some() {
            let plans = [Self::plan, Self::plan_ranges].map(|call| self.planned(client, call));
            assert!(plans[0] == plans[1], "{:?}: the plans differ", self.pattern);
        }
        self.prepare(client);
        let read = |handle: &Handle| client.read_one(handle.clone()).expect("the launch failed");
        let (out, lse) = (read(&self.out), read(&self.lse));
        let out: &[bf16] = bytemuck::cast_slice(&out);
        let lse: &[f32] = bytemuck::cast_slice(&lse);
        let p = &self.problem.attention;
        let (len, dim) = (p.q_len, p.head_dim);
        let mask = self.mask.as_ref().map(read);
        let mut rng = Rng::new(11);
        for _ in 0..24 {
            let (head, query) = (rng.below(p.q_heads), rng.below(len));
            let kv = head / p.group();
            let row = |values: &[bf16], at: usize| -> Vec<f64> {
                values[at * dim..(at + 1) * dim]
                    .iter()
                    .map(|x| x.to_f64())
                    .collect()
            };
            let q = row(&self.rows[0], head * len + query);
            let seen = |j: usize| mask.as_ref().is_none_or(|mask| mask[query * len + j] != 0);
            let keys: Vec<usize> = (0..=query).filter(|&j| seen(j)).collect();
            let logits: Vec<f64> = (keys.iter())
                .map(|&j| {
                    let k = row(&self.rows[1], kv * len + j);
                    let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                    let bias = match self.problem.bias {
                        None => 0.0,
                        Some([_, _, 1, _]) => self.bias[kv * len + j],
                        Some([_, heads, _, _]) => {
                            self.bias[(head / (p.q_heads / heads) * len + query) * len + j]
                        }
                    };
                    f64::from(p.scale) * dot + f64::from(bias)
                })
                .collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
            let at = head * len + query;
            let want = max + sum.ln();
            assert!(
                (f64::from(lse[at]) - want).abs() < 1e-4 || keys.is_empty(),
                "{:?}: lse of head {head} query {query}: {} instead of {want}",
                self.pattern,
                lse[at]
            );
            let mut exact = vec![0.0; dim];
            let kept = p.dropout_weights(head, query);
            for (&j, x) in keys.iter().zip(&logits) {
                let weight = f64::from(kept(j)) * (x - max).exp() / sum;
                for (w, v) in exact.iter_mut().zip(row(&self.rows[2], kv * len + j)) {
                    *w += weight * v;
                }
            }
            let size = exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for (c, (got, want)) in row(out, at).iter().zip(&exact).enumerate() {
                assert!(
                    (got - want).abs() <= 1.6e-2 * size,
                    "{:?}: out of head {head} query {query} column {c}: {got} instead of {want}",
                    self.pattern
                );
            }
        }
    }
}

/// The first key and one past the last that each query sees, for patterns of contiguous ranges.
fn ranges(pattern: Pattern, len: usize) -> Option<[Vec<i32>; 2]> {
    let first = |i: usize| match pattern {
        Pattern::All => Some(0),
        Pattern::Window(window) => Some((i + 1).saturating_sub(window)),
        Pattern::Documents(document) => Some(i / document * document),
        Pattern::Unmasked | Pattern::Top(_) | Pattern::Scattered(_) => None,
    };
    let firsts = (0..len).map(|i| first(i).map(|j| j as i32));
    let end = |i: usize| match pattern {
        Pattern::All => len,
        _ => i + 1,
    };
    Some([
        firsts.collect::<Option<_>>()?,
        (0..len).map(|i| end(i) as i32).collect(),
    ])
}

/// The mask `[len, len]`, one byte per pair; what causal masking hides may be anything.
fn mask(pattern: Pattern, len: usize, bias: &[f32], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0u8; len * len];
    // The keys seen so far, the best first.
    let mut best: Vec<usize> = Vec::new();
    for (i, row) in bytes.chunks_mut(len).enumerate() {
        match pattern {
            Pattern::Unmasked | Pattern::All => row.fill(1),
            Pattern::Window(window) => row[(i + 1).saturating_sub(window)..=i].fill(1),
            Pattern::Documents(document) => row[i / document * document..=i].fill(1),
            Pattern::Scattered(density) => {
                row.iter_mut()
                    .for_each(|x| *x = u8::from(rng.uniform() < density));
            }
            Pattern::Top(window) => {
                let at = best.partition_point(|&j| bias[j] >= bias[i]);
                best.insert(at, i);
                best.truncate(window);
                best.iter().for_each(|&j| row[j] = 1);
            }
        }
    }
    bytes
}

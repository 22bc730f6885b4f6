//! Buffers of a case on a device, the calls on them, and their check.

use super::cases::{Case, Pattern};
use super::check::{check_row, dot};
use crate::device::sync;
use crate::tensor::Tensor;
use cubecl::client::Client;
use flash_dma_kernels::{
    AttentionOptions, Backward, Dropout, ElementType, Engine, Forward, MaskBits, MaskedGradients,
    MaskedInputs, MaskedProblem, Outputs, Saved, plan, plan_ranges,
};
use flash_dma_reference::Rng;
use half::bf16;
use std::ops::Range;

/// A timed call.
pub type Call = fn(&Calls, &Client);

/// The buffers of a case.
pub struct Calls {
    /// Fraction of visible pairs among those that causal masking leaves.
    pub density: f64,
    problem: MaskedProblem,
    pattern: Pattern,
    rows: [Vec<bf16>; 3],
    bias: Vec<f32>,
    mask: Option<Tensor>,
    /// First key and one past the last that each query sees, if it sees exactly the keys in between.
    ranges: Option<[Tensor; 2]>,
    /// Bits of the mask and their counts, written by the phases `plan` and `plan-ranges`.
    bits: Option<[Tensor; 2]>,
    inputs: MaskedInputs,
    out: Tensor,
    lse: Tensor,
    /// Without the residual.
    saved: Saved,
    /// Rounding error of `out`, which a training step keeps.
    residual: Tensor,
    lse_rest: Tensor,
    grads: MaskedGradients,
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
        // The mask also takes its best keys from it.
        let biases = bias_shape.map_or(len, |shape| shape.iter().product());
        let bias: Vec<f32> = (0..biases).map(|_| rng.normal() as f32).collect();
        let pairs = len * (len + 1) / 2;
        let mut visible = pairs;
        let mask = masked.then(|| {
            let bytes = mask(case.pattern, len, &bias[..len], &mut rng);
            let seen = |row: &[u8]| row.iter().map(|&x| usize::from(x)).sum::<usize>();
            let rows = bytes.chunks(len).enumerate();
            visible = rows.map(|(i, row)| seen(&row[..=i])).sum();
            Tensor::of(client, &mask_shape, &bytes)
        });
        let ranges = ranges(case.pattern, len)
            .map(|ranges| ranges.map(|keys| Tensor::of(client, &[1, 1, len, 1], &keys)));
        let empty = |shape: &[usize], size: usize| Tensor::empty(client, shape, size);
        let bits = (problem.plan)
            .map(|plan| [empty(&plan.bits_shape(), 4), empty(&plan.counts_shape(), 4)]);
        let upload = |shape: &[usize], values: &[bf16]| Tensor::of(client, shape, values).binding();
        let inputs = MaskedInputs {
            q: upload(&q, &rows[0]),
            k: upload(&kv, &rows[1]),
            v: upload(&kv, &rows[2]),
            plan: bits.as_ref().map(mask_bits),
            bias: bias_shape.map(|shape| Tensor::of(client, &shape, &bias).binding()),
        };
        let (out, lse) = (empty(&q, 2), empty(&q[..3], 4));
        let residual = problem.attention.residual_shape().expect("bf16 has one");
        // Zero before the first forward pass for a backward pass.
        let lse_rest = Tensor::zeros(client, &q[..3]);
        let saved = Saved {
            out: out.binding(),
            residual: None,
            lse: lse.binding(),
            lse_rest: Some(lse_rest.binding()),
            grad_out: upload(&q, &grad_out),
            grad_lse: None,
        };
        let grads = MaskedGradients {
            q: empty(&q, 2).binding(),
            k: empty(&kv, 2).binding(),
            v: empty(&kv, 2).binding(),
            bias: bias_shape.map(|shape| empty(&shape, 4).binding()),
        };
        Self {
            density: visible as f64 / pairs as f64,
            problem,
            pattern: case.pattern,
            rows,
            bias,
            mask,
            ranges,
            bits,
            inputs,
            out,
            lse,
            saved,
            residual: empty(&residual, 2),
            lse_rest,
            grads,
        }
    }

    /// Each phase of the case with its engine.
    pub fn phases(&self, client: &Client) -> Vec<(&'static str, &'static str, Call)> {
        let (problem, inputs) = (&self.problem, &self.inputs);
        let forward = problem
            .plan_forward(client, inputs, None)
            .expect("a valid call");
        let backward = problem
            .plan_backward(client, inputs, &self.saved, None)
            .expect("a valid call");
        let mut phases: Vec<(_, _, Call)> = Vec::new();
        if self.mask.is_some() {
            phases.push(("plan", "portable", Self::plan));
        }
        if self.ranges.is_some() {
            phases.push(("plan-ranges", "portable", Self::plan_ranges));
        }
        let [forward, backward] = [forward.engine(), backward.engine()].map(Engine::name);
        phases.push(("forward", forward, Self::forward::<false>));
        phases.push(("forward-residual", forward, Self::forward::<true>));
        phases.push(("backward", backward, Self::backward::<false>));
        phases.push(("backward-residual", backward, Self::backward::<true>));
        phases
    }

    fn plan(&self, client: &Client) {
        let (Some(mask), Some(bits), Some(geometry)) =
            (&self.mask, &self.inputs.plan, &self.problem.plan)
        else {
            return;
        };
        plan(client, geometry, mask.binding(), 1, false, bits.clone()).expect("a valid plan");
    }

    fn plan_ranges(&self, client: &Client) {
        let (Some([first, end]), Some(bits), Some(geometry)) =
            (&self.ranges, &self.inputs.plan, &self.problem.plan)
        else {
            return;
        };
        let (first, end) = (first.binding(), end.binding());
        plan_ranges(client, geometry, first, end, bits.clone()).expect("a valid plan");
    }

    /// The bits and counts that a call writes, over zeros.
    fn planned(&mut self, client: &Client, call: Call) -> [Vec<u8>; 2] {
        let bits = self.bits.as_mut().expect("there is a mask");
        *bits = bits
            .each_ref()
            .map(|tensor| Tensor::zeros(client, tensor.shape()));
        self.inputs.plan = Some(mask_bits(bits));
        call(self, client);
        let bits = self.bits.as_ref().expect("there is a mask");
        bits.each_ref().map(|tensor| tensor.read(client))
    }

    /// `RESIDUAL`: with the residual, as a training step calls it.
    fn forward<const RESIDUAL: bool>(&self, client: &Client) {
        let mut outputs = Outputs::new(self.out.binding(), self.lse.binding());
        if RESIDUAL {
            outputs.residual = Some(self.residual.binding());
            outputs.lse_rest = Some(self.lse_rest.binding());
        }
        (self.problem)
            .plan_forward(client, &self.inputs, None)
            .and_then(|plan| plan.run(outputs))
            .expect("a valid call");
    }

    /// `RESIDUAL`: with the residual, as a training step calls it.
    fn backward<const RESIDUAL: bool>(&self, client: &Client) {
        let saved = Saved {
            residual: RESIDUAL.then(|| self.residual.binding()),
            ..self.saved.clone()
        };
        (self.problem)
            .plan_backward(client, &self.inputs, &saved, None)
            .and_then(|plan| plan.run(self.grads.clone()))
            .expect("a valid call");
    }

    /// Builds the plan and the outputs that the phases read.
    pub fn prepare(&self, client: &Client) {
        self.plan(client);
        self.forward::<true>(client);
        sync(client);
    }

    /// Builds the plan, in both ways if there are two, and compares sampled rows of a forward pass with f64. Panics
    /// if a result is wrong.
    pub fn check(&mut self, client: &Client) {
        if self.ranges.is_some() {
            let plans = [Self::plan, Self::plan_ranges].map(|call| self.planned(client, call));
            assert!(plans[0] == plans[1], "{:?}: the plans differ", self.pattern);
        }
        self.prepare(client);
        let out = self.out.read_as(client, ElementType::Bf16);
        let lse = self.lse.read_as(client, ElementType::F32);
        let mask = self.mask.as_ref().map(|mask| mask.read::<u8>(client));
        let p = &self.problem.attention;
        let (len, dim) = (p.q_len, p.head_dim);
        let mut rng = Rng::new(11);
        for _ in 0..24 {
            let (head, query) = (rng.below(p.q_heads), rng.below(len));
            let kv = head / p.group();
            let at = head * len + query;
            let row = |tensor: usize, at: usize| &self.rows[tensor][at * dim..][..dim];
            let seen = |j: &usize| mask.as_ref().is_none_or(|mask| mask[query * len + j] != 0);
            let logit = |key: usize| {
                let bias = match self.problem.bias {
                    None => 0.0,
                    Some([_, _, 1, _]) => self.bias[kv * len + key],
                    Some([_, heads, _, _]) => {
                        self.bias[(head / (p.q_heads / heads) * len + query) * len + key]
                    }
                };
                let product = dot(row(0, at), row(1, kv * len + key));
                f64::from(p.scale) * product + f64::from(bias)
            };
            let keys = (0..=query).filter(seen);
            let logits: Vec<_> = keys.map(|key| (key, logit(key))).collect();
            let value = |key| row(2, kv * len + key).iter().map(|v| v.to_f64()).collect();
            let got = (lse[at], &out[at * dim..][..dim]);
            check_row(p, [head, query], &logits, got, value);
        }
    }
}

fn mask_bits([bits, counts]: &[Tensor; 2]) -> MaskBits {
    MaskBits {
        bits: bits.binding(),
        counts: counts.binding(),
    }
}

/// Keys that query `i` sees, for patterns of contiguous ranges.
fn range(pattern: Pattern, i: usize, len: usize) -> Option<Range<usize>> {
    match pattern {
        Pattern::All => Some(0..len),
        Pattern::Window(window) => Some((i + 1).saturating_sub(window)..i + 1),
        Pattern::Documents(document) => Some(i / document * document..i + 1),
        Pattern::Unmasked | Pattern::Top(_) | Pattern::Scattered(_) => None,
    }
}

/// First key and one past the last that each query sees, for these patterns.
fn ranges(pattern: Pattern, len: usize) -> Option<[Vec<i32>; 2]> {
    let ranges = (0..len).map(|i| range(pattern, i, len));
    let (first, end) = ranges
        .map(|range| range.map(|keys| (keys.start as i32, keys.end as i32)))
        .collect::<Option<_>>()?;
    Some([first, end])
}

/// The mask `[len, len]`, one byte per pair; pairs hidden by causal masking have any value.
fn mask(pattern: Pattern, len: usize, bias: &[f32], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0u8; len * len];
    // The keys seen so far, the best first.
    let mut best: Vec<usize> = Vec::new();
    for (i, row) in bytes.chunks_mut(len).enumerate() {
        match pattern {
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
            _ => row[range(pattern, i, len).expect("a mask")].fill(1),
        }
    }
    bytes
}

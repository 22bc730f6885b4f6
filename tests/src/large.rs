//! Problems too large for the whole oracle, on sampled rows and keys. The inputs are made on the device, element by
//! element from their indices, and again on the host for the rows that the oracle reads.

use crate::engine::skip;
use crate::engines::buffers::{Output, contiguous};
use crate::engines::kernels::{Kernels, Ran, Target, planned};
use cubecl::prelude::*;
use flash_dma_kernels::{self as engine, Backward as _, Forward as _};
use flash_dma_problem::ElementType::{self, F32};
use flash_dma_problem::{Problem, memory::Passes};
use flash_dma_reference::Rng;
use flash_dma_reference::compare::{GRADIENT, OUTPUT};
use flash_dma_reference::sampled::{SampledKeys, Source, attended_keys, spread};
use half::bf16;
use std::num::Wrapping;
use std::ops::Range;

/// The number of kv heads in the sample, the first and the last among them, and of query rows and keys per head.
const HEADS: usize = 4;
const ROWS: usize = 24;
const KEYS: usize = 24;

/// Seeds of the rows of q, k, v and dO, and of the scores.
const SEEDS: [u32; 5] = [11, 12, 13, 14, 15];

/// Factors of [`hash`]; odd.
const FACTORS: [u32; 4] = [0x1E37_79B1, 0x05EB_CA6B, 0x2C1B_3C6D, 0x297A_2D39];

/// 32 bits that look random.
#[cube]
fn hash(row: u32, column: u32, seed: u32) -> u32 {
    let mut bits = row * FACTORS[0] + column * FACTORS[1] + seed * FACTORS[2];
    bits ^= bits >> 15;
    bits *= FACTORS[2];
    bits ^= bits >> 12;
    bits *= FACTORS[3];
    bits ^ (bits >> 15)
}

fn host_hash(row: u32, column: u32, seed: u32) -> u32 {
    let factors = FACTORS.map(Wrapping);
    let [row, column, seed] = [row, column, seed].map(Wrapping);
    let mut bits = row * factors[0] + column * factors[1] + seed * factors[2];
    bits ^= bits >> 15;
    bits *= factors[2];
    bits ^= bits >> 12;
    bits *= factors[3];
    (bits ^ (bits >> 15)).0
}

/// Fills contiguous rows of `width` elements with steps of 1/64 from −2 to below 2, exact in every type.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<E: Float>(
    rows: &mut [E],
    len: usize,
    width: usize,
    seed: u32,
    #[define(E)] _element: ElemType,
) {
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut at = ABSOLUTE_POS;
    while at < len {
        let bits = hash((at / width) as u32, (at % width) as u32, seed) >> 24;
        rows[at] = E::cast_from((f32::cast_from(bits) - 128.0) / 64.0);
        at += stride;
    }
}

/// A row as written by [`fill_kernel`].
fn host_row(row: usize, seed: u32, into: &mut [f64]) {
    for (column, x) in into.iter_mut().enumerate() {
        let bits = host_hash(row as u32, column as u32, seed) >> 24;
        *x = (f64::from(bits) - 128.0) / 64.0;
    }
}

/// The bytes of a contiguous tensor of f32 or bf16, as read from the device.
struct Read {
    bytes: cubecl::bytes::Bytes,
    element: ElementType,
}

impl Read {
    /// A reader of rows of the requested length.
    fn rows(&self) -> impl Fn(usize, &mut [f64]) + Sync {
        |row, into| self.row(row, into)
    }

    /// Row `row` of rows as long as `into`.
    fn row(&self, row: usize, into: &mut [f64]) {
        let size = self.element.size();
        let at = row * into.len() * size;
        let bytes = &self.bytes[at..at + into.len() * size];
        for (x, bytes) in into.iter_mut().zip(bytes.chunks_exact(size)) {
            *x = match self.element {
                ElementType::Bf16 => bytemuck::pod_read_unaligned::<bf16>(bytes).to_f64(),
                _ => f64::from(bytemuck::pod_read_unaligned::<f32>(bytes)),
            };
        }
    }
}

impl<T: Target> Kernels<T> {
    /// A contiguous tensor that nothing was written to.
    fn unwritten(&self, shape: &[usize], element: ElementType) -> Output {
        let bytes = shape.iter().product::<usize>() * element.size();
        Output {
            handle: self.client.empty(bytes),
            shape: shape.into(),
            element,
        }
    }

    /// A contiguous tensor of random rows.
    fn filled(&self, shape: [usize; 4], element: ElementType, seed: u32) -> TensorBinding {
        let tensor = self.unwritten(&shape, element).binding();
        let len: usize = shape.iter().product();
        let units = len.div_ceil(16);
        let dim = CubeDim::new(&self.client, units);
        let cubes = units.div_ceil(dim.num_elems() as usize).min(65535);
        let elem = match element {
            ElementType::Bf16 => bf16::elem_type_native(),
            _ => f32::elem_type_native(),
        };
        // SAFETY: the kernel writes `len` elements, which the buffer holds.
        unsafe {
            fill_kernel::launch_unchecked(
                &self.client,
                CubeCount::Static(cubes as u32, 1, 1),
                dim,
                tensor.required_address_type(element.size()),
                tensor.clone().into_buffer_arg(),
                len,
                shape[3],
                seed,
                elem,
            );
        }
        tensor
    }

    fn read_back(&self, output: Output) -> Read {
        let (handle, element) = (output.handle, output.element);
        let bytes = self.client.read_one(handle).expect("no launch failed");
        Read { bytes, element }
    }

    /// Runs the selection and both passes of a problem of f32 or bf16 on the engine of this target, as a training step
    /// does: in 16 bits with the residual of `out`. Compares
    /// sampled rows of the outputs and of dq, and sampled keys of the other gradients, with f64. Skips problems that
    /// exceed the device's memory.
    pub fn check_sampled(&self, problem: &Problem) {
        let (client, p) = (&self.client, problem);
        let needed = engine::required_bytes(client, p, Passes::ForwardAndBackward);
        let needed = needed.expect("the device serves the problem") as u64;
        let memory = client.properties().memory.max_memory();
        if memory.is_some_and(|memory| needed > memory / 10 * 9) {
            skip::<Self>(&format!("{needed} bytes of {memory:?} for {p:?}"));
            return;
        }
        let (rows, keys) = (p.q_shape(), p.kv_shape());
        let [q, grad_out] = [0, 3].map(|n| self.filled(rows, p.element, SEEDS[n]));
        let [k, v] = [1, 2].map(|n| self.filled(keys, p.element, SEEDS[n]));
        let scores: Option<Vec<f32>> = p.has_scores.then(|| {
            let keys = 0..p.scores_shape().iter().product::<usize>() as u32;
            keys.map(|key| (host_hash(key, 0, SEEDS[4]) >> 8) as f32 / (1 << 22) as f32 - 2.0)
                .collect()
        });
        let selection = scores.as_ref().map(|values| {
            let scores = self.buffer(bytemuck::cast_slice(values));
            let scores = contiguous(&scores, &p.scores_shape());
            let intervals = self.unwritten(&p.intervals_shape(), F32);
            let (given, to) = (scores.clone(), intervals.binding());
            engine::select(client, given, p.window, to).expect("a selection");
            let intervals = intervals.binding();
            engine::Selection {
                scores,
                intervals,
                learning: None,
            }
        });
        let inputs = engine::Inputs { q, k, v, selection };

        let forwarded = Ran::new(p, true, |shape, element| self.unwritten(shape, element));
        let kind = Self::forced(planned(&p.plan_forward(client, &inputs, None)));
        p.plan_forward(client, &inputs, Some(kind))
            .and_then(|plan| plan.run(forwarded.outputs()))
            .expect("a forward pass");
        let saved = forwarded.saved(grad_out, None);
        let grad_q = self.unwritten(&rows, p.element);
        let [grad_k, grad_v] = [(); 2].map(|()| self.unwritten(&keys, p.element));
        let grad_scores = (p.has_scores).then(|| self.unwritten(&p.scores_shape(), F32));
        let grads = engine::Gradients {
            q: grad_q.binding(),
            k: grad_k.binding(),
            v: grad_v.binding(),
            scores: grad_scores.as_ref().map(Output::binding),
            rank: None,
        };
        let kind = Self::forced(planned(&p.plan_backward(client, &inputs, &saved, None)));
        p.plan_backward(client, &inputs, &saved, Some(kind))
            .and_then(|plan| plan.run(grads))
            .expect("a backward pass");

        let source = Source {
            problem: *p,
            q: &|row, into| host_row(row, SEEDS[0], into),
            k: &|row, into| host_row(row, SEEDS[1], into),
            v: &|row, into| host_row(row, SEEDS[2], into),
            scores: scores.as_deref(),
            grad_out: &|row, into| host_row(row, SEEDS[3], into),
            grad_lse: None,
        };
        let mut rng = Rng::new(17);
        let mut worst = Worst::default();
        let Ran {
            out, lse, residual, ..
        } = forwarded;
        let (out, lse) = (self.read_back(out), self.read_back(lse));
        let sampled = source.rows(&source.choose_rows(HEADS, ROWS, &mut rng));
        let of_out = &sampled.out;
        worst.note(of_out.compare("out", &rows, &out.rows(), p.element, OUTPUT));
        worst.note(sampled.lse.compare_lse(&p.lse_shape(), &lse.rows()));
        let (of_q, grad_q) = (&sampled.q, self.read_back(grad_q));
        worst.note(of_q.compare("dq", &rows, &grad_q.rows(), p.element, GRADIENT));
        drop(grad_q);

        let residual = residual.map(|residual| self.read_back(residual));
        // The backward pass reads `out` before its rounding.
        let precise = |row: usize, into: &mut [f64]| {
            out.row(row, into);
            if let Some(residual) = &residual {
                let mut lost = vec![0.0; into.len()];
                residual.row(row, &mut lost);
                into.iter_mut().zip(lost).for_each(|(x, lost)| *x += lost);
            }
        };
        let mut sampled: Option<SampledKeys> = None;
        for head in spread(p.batch * p.kv_heads, HEADS, &mut rng) {
            let chosen = attended_keys(&source.intervals(head), KEYS, &mut rng);
            let of_head = source.keys(head, &chosen, &precise, &lse.rows());
            match &mut sampled {
                Some(sampled) => sampled.append(of_head),
                None => sampled = Some(of_head),
            }
        }
        let sampled = sampled.expect("there is a head");
        for (name, sampled, output) in [("dk", &sampled.k, grad_k), ("dv", &sampled.v, grad_v)] {
            let output = self.read_back(output);
            worst.note(sampled.compare(name, &keys, &output.rows(), p.element, GRADIENT));
        }
        if let (Some(sampled), Some(output)) = (&sampled.scores, grad_scores) {
            let (shape, output) = (p.scores_shape(), self.read_back(output));
            let result = sampled.compare("dscores", &shape, &output.rows(), F32, GRADIENT);
            worst.note(result);
        }
        assert!(
            worst.0.is_empty(),
            "{} on {p:?}:\n{}",
            T::NAME,
            worst.0.join("\n")
        );
    }
}

/// The faults, one line each.
#[derive(Default)]
struct Worst(Vec<String>);

impl Worst {
    fn note<R>(&mut self, result: Result<R, impl std::fmt::Display>) {
        if let Err(failure) = result {
            self.0.push(failure.to_string());
        }
    }
}

/// The pattern is the same on the device and the host, and its rows are not alike.
pub fn check_pattern<T: Target>(kernels: &Kernels<T>, rows: Range<usize>) {
    let (len, width) = (rows.end, 8);
    let tensor = kernels.filled([1, 1, len, width], F32, SEEDS[0]);
    let bytes = kernels.read_bytes(&tensor, 4);
    let device: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
    let mut all = Vec::new();
    for row in rows {
        let mut host = vec![0.0; width];
        host_row(row, SEEDS[0], &mut host);
        let read = device[row * width..(row + 1) * width].iter();
        let read: Vec<f64> = read.map(|&x| f64::from(x)).collect();
        assert_eq!(read, host, "row {row}");
        all.extend(host);
    }
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let square = all.iter().map(|x| x * x).sum::<f64>() / all.len() as f64;
    assert!(mean.abs() < 0.1, "{mean}");
    assert!((1.2..1.5).contains(&square), "{square}");
}

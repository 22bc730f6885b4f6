//! Code shared by the tests of the attention kernels: tensors on cubecl-cpu and problems from the oracle.

use crate::args::{Inputs, Selection};
use crate::{ElementType, Problem};
use cubecl::Device;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionOptions, contiguous_strides};
use flash_dma_reference as oracle;
use half::{bf16, f16};

/// The CPU runtime.
pub(crate) fn client() -> Client {
    Device::Cpu(Default::default()).client()
}

/// The layout of a test tensor in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Row-major.
    Contiguous,
    /// As `[batch, len, heads, head_dim]`, read through a transpose.
    TokenMajor,
    /// Rows with a gap that no vector width divides.
    Gaps,
}

/// A problem of `q = [batch, q_heads, q_len, head_dim]`, `kv = [kv_heads, k_len]`.
pub(crate) fn problem(
    q: [usize; 4],
    kv: [usize; 2],
    scores: bool,
    element: ElementType,
    options: &AttentionOptions,
) -> Problem {
    let k = [q[0], kv[0], kv[1], q[3]];
    Problem::new(&q, &k, &k, scores.then_some(&k[..3]), element, options).unwrap()
}

fn encode(values: &[f64], element: ElementType) -> Vec<u8> {
    let each = |x: &f64| match element {
        ElementType::F32 => (*x as f32).to_le_bytes().to_vec(),
        ElementType::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
        ElementType::Bf16 => bf16::from_f64(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

/// A tensor on the device with the given values in row-major order.
pub(crate) fn upload(
    client: &Client,
    values: &[f64],
    shape: &[usize],
    element: ElementType,
    placement: Placement,
) -> TensorBinding {
    let mut strides: Vec<usize> = contiguous_strides(shape).collect();
    match placement {
        Placement::Contiguous => {}
        Placement::TokenMajor => {
            let [batch, heads, len, dim] = shape.try_into().unwrap();
            let _: usize = batch;
            strides = vec![len * heads * dim, dim, heads * dim, 1];
        }
        Placement::Gaps => {
            let last = shape.len() - 1;
            for axis in (0..last).rev() {
                strides[axis] = if axis + 1 == last {
                    shape[last] + 3
                } else {
                    strides[axis + 1] * shape[axis + 1] + 1
                };
            }
        }
    }
    let reach: usize = 1 + shape
        .iter()
        .zip(&strides)
        .map(|(&n, &s)| n.max(1).saturating_sub(1) * s)
        .sum::<usize>();
    // The gaps must never be read.
    let mut placed = vec![f64::NAN; reach];
    for (at, &value) in values.iter().enumerate() {
        let mut rest = at;
        let mut to = 0;
        for axis in (0..shape.len()).rev() {
            to += rest % shape[axis] * strides[axis];
            rest /= shape[axis];
        }
        placed[to] = value;
    }
    let handle = client.create_from_slice(&encode(&placed, element));
    TensorBinding {
        handle: handle.binding(),
        strides: strides.into(),
        shape: shape.into(),
        tiling: Default::default(),
    }
}

/// An output tensor, filled with NaN so that an element left out shows.
pub(crate) struct Output {
    handle: cubecl::server::Handle,
    shape: Vec<usize>,
    element: ElementType,
}

impl Output {
    /// A contiguous output.
    pub(crate) fn new(client: &Client, shape: &[usize], element: ElementType) -> Self {
        let len = shape.iter().product::<usize>();
        let handle = client.create_from_slice(&encode(&vec![f64::NAN; len.max(1)], element));
        Self {
            handle,
            shape: shape.into(),
            element,
        }
    }

    /// The binding to pass.
    pub(crate) fn binding(&self) -> TensorBinding {
        TensorBinding {
            handle: self.handle.clone().binding(),
            strides: contiguous_strides(&self.shape).collect(),
            shape: self.shape.as_slice().into(),
            tiling: Default::default(),
        }
    }

    /// The binding of `[batch, heads, len, features]` that is written with each token's heads together.
    pub(crate) fn token_major(&self) -> TensorBinding {
        let &[batch, heads, len, features] = &self.shape[..] else {
            panic!("rows of heads have four axes");
        };
        let mut binding = self.binding();
        let placed = [batch, len, heads, features];
        binding.strides = contiguous_strides(&placed).collect();
        binding.strides.swap(1, 2);
        binding
    }

    /// The values that [`token_major`](Self::token_major) has received, head by head.
    pub(crate) fn read_token_major(&self, client: &Client) -> Vec<f64> {
        let &[_, heads, len, features] = &self.shape[..] else {
            panic!("rows of heads have four axes");
        };
        let values = self.read(client);
        let sequences = values.chunks(heads * len * features);
        let by_head = sequences.flat_map(|rows| {
            (0..heads * len).flat_map(move |row| {
                let (head, token) = (row / len, row % len);
                rows[(token * heads + head) * features..][..features].to_vec()
            })
        });
        by_head.collect()
    }

    /// The values.
    pub(crate) fn read(&self, client: &Client) -> Vec<f64> {
        let bytes = client
            .read_one(self.handle.clone())
            .expect("the kernels run");
        let len = self.shape.iter().product();
        let values: Vec<f64> = match self.element {
            ElementType::F32 => bytes
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            ElementType::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64())
                .collect(),
            ElementType::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f64())
                .collect(),
        };
        values[..len].to_vec()
    }
}

/// The oracle's inputs on the device, with the oracle's own intervals.
pub(crate) fn upload_inputs(
    client: &Client,
    inputs: &oracle::Inputs,
    placement: Placement,
) -> Inputs {
    let p = &inputs.problem;
    let rows =
        |values: &[f64], shape: [usize; 4]| upload(client, values, &shape, p.element, placement);
    Inputs {
        q: rows(&inputs.q, p.q_shape()),
        k: rows(&inputs.k, p.kv_shape()),
        v: rows(&inputs.v, p.kv_shape()),
        selection: inputs.scores.as_ref().map(|scores| {
            let bytes: Vec<u8> = scores
                .chunks(p.k_len.max(1))
                .flat_map(|head| oracle::select::intervals_by_heap(head, p.window))
                .flat_map(|interval| [interval.first, interval.end])
                .flat_map(u32::to_le_bytes)
                .chain([0; 4])
                .collect();
            let shape = p.intervals_shape();
            Selection {
                scores: upload(
                    client,
                    scores,
                    &p.scores_shape(),
                    ElementType::F32,
                    Placement::Contiguous,
                ),
                intervals: TensorBinding {
                    handle: client.create_from_slice(&bytes).binding(),
                    strides: contiguous_strides(&shape).collect(),
                    shape: shape.as_slice().into(),
                    tiling: Default::default(),
                },
                far: None,
            }
        }),
    }
}

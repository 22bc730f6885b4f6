//! Tensors on cubecl-cpu and problems from the oracle, for the tests of this crate.

use crate::args::{Inputs, Selection};
use crate::portable::blueprint::{Micro, micro};
use crate::{AlibiSlopes, Dropout, ElementType, Problem};
use cubecl::Device;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::CopyDescriptor;
use flash_dma_problem::{AttentionOptions, Interval, contiguous_strides};
use flash_dma_reference as oracle;
use flash_dma_reference::generate::{Scores, inputs};
use half::{bf16, f16};

pub(crate) fn client() -> Client {
    Device::Cpu(Default::default()).client()
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

/// A tensor of `values` (row-major) laid out with `strides`, and `gap` between them.
fn laid_out<E: CubeElement>(
    client: &Client,
    values: impl Iterator<Item = E>,
    gap: E,
    shape: &[usize],
    strides: &[usize],
) -> TensorBinding {
    let axes = shape.iter().zip(strides);
    let last = axes.map(|(n, s)| n.saturating_sub(1) * s);
    let mut buffer = vec![gap; last.sum::<usize>() + 1];
    for (i, value) in values.take(shape.iter().product()).enumerate() {
        let (mut rest, mut offset) = (i, 0);
        for (n, stride) in shape.iter().zip(strides).rev() {
            offset += rest % n * stride;
            rest /= n;
        }
        buffer[offset] = value;
    }
    TensorBinding {
        handle: client.create_from_slice(E::as_bytes(&buffer)).binding(),
        strides: strides.iter().copied().collect(),
        shape: shape.into(),
        tiling: Default::default(),
    }
}

/// A tensor of `values` (row-major) laid out with `strides`.
pub(crate) fn strided<E: CubeElement>(
    client: &Client,
    values: &[E],
    shape: &[usize],
    strides: &[usize],
) -> TensorBinding {
    let gap = values.first().copied().unwrap_or(E::maximum_value());
    laid_out(client, values.iter().copied(), gap, shape, strides)
}

pub(crate) fn contiguous<E: CubeElement>(
    client: &Client,
    values: &[E],
    shape: &[usize],
) -> TensorBinding {
    let strides: Vec<usize> = contiguous_strides(shape).collect();
    strided(client, values, shape, &strides)
}

/// A contiguous tensor of zeros of a 32-bit type.
pub(crate) fn zeros(client: &Client, shape: &[usize]) -> TensorBinding {
    contiguous(client, &vec![0u32; shape.iter().product()], shape)
}

/// The intervals of the kv heads of one sequence as the selection of a call. The scores are zeros.
pub(crate) fn selection(client: &Client, heads: &[Vec<Interval>]) -> Selection {
    let shape = [1, heads.len(), heads[0].len(), 2];
    let words = heads.iter().flatten().flat_map(|i| [i.first, i.end]);
    Selection {
        scores: zeros(client, &shape[..3]),
        intervals: contiguous(client, &words.collect::<Vec<u32>>(), &shape),
        learning: None,
    }
}

fn read<E: CubeElement>(client: &Client, tensor: TensorBinding) -> Vec<E> {
    let len = tensor.size();
    if len == 0 {
        return Vec::new();
    }
    let bytes = client.read_one_unchecked_tensor(CopyDescriptor {
        handle: tensor.handle,
        shape: tensor.shape,
        strides: tensor.strides,
        elem_size: size_of::<E>(),
    });
    E::from_bytes(&bytes)[..len].to_vec()
}

pub(crate) fn read_u32(client: &Client, tensor: TensorBinding) -> Vec<u32> {
    read(client, tensor)
}

/// The content of a contiguous tensor of an element type.
pub(crate) fn read_f64(client: &Client, tensor: TensorBinding, element: ElementType) -> Vec<f64> {
    fn wide<E: CubeElement + Into<f64>>(client: &Client, tensor: TensorBinding) -> Vec<f64> {
        let values = read::<E>(client, tensor);
        values.into_iter().map(Into::into).collect()
    }
    match element {
        ElementType::F32 => wide::<f32>(client, tensor),
        ElementType::F16 => wide::<f16>(client, tensor),
        ElementType::Bf16 => wide::<bf16>(client, tensor),
    }
}

/// The layout of a test tensor in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    Contiguous,
    /// `[batch, len, heads, head_dim]`, read through a transpose.
    TokenMajor,
    /// Rows with a gap that no vector width divides.
    Gaps,
}

impl Placement {
    fn strides(self, shape: &[usize]) -> Vec<usize> {
        let mut strides: Vec<usize> = contiguous_strides(shape).collect();
        match self {
            Self::Contiguous => {}
            Self::TokenMajor => {
                let &[_, heads, len, dim] = shape else {
                    panic!("rows of heads have four axes");
                };
                strides = vec![len * heads * dim, dim, heads * dim, 1];
            }
            Self::Gaps => {
                let mut inner = shape[shape.len() - 1] + 2;
                for axis in (0..shape.len() - 1).rev() {
                    strides[axis] = inner + 1;
                    inner = strides[axis] * shape[axis];
                }
            }
        }
        strides
    }
}

/// A tensor on the device with the given values in row-major order.
pub(crate) fn upload(
    client: &Client,
    values: &[f64],
    shape: &[usize],
    element: ElementType,
    placement: Placement,
) -> TensorBinding {
    upload_strided(client, values, shape, &placement.strides(shape), element)
}

/// [`upload`] with strides. The gaps are NaN, as they must never be read.
pub(crate) fn upload_strided(
    client: &Client,
    values: &[f64],
    shape: &[usize],
    strides: &[usize],
    element: ElementType,
) -> TensorBinding {
    let x = values.iter().copied();
    match element {
        ElementType::F32 => laid_out(client, x.map(|x| x as f32), f32::NAN, shape, strides),
        ElementType::F16 => laid_out(client, x.map(f16::from_f64), f16::NAN, shape, strides),
        ElementType::Bf16 => laid_out(client, x.map(bf16::from_f64), bf16::NAN, shape, strides),
    }
}

/// A contiguous output tensor, filled with NaN so that an element left out shows.
pub(crate) struct Output {
    tensor: TensorBinding,
    element: ElementType,
}

impl Output {
    pub(crate) fn new(client: &Client, shape: &[usize], element: ElementType) -> Self {
        let tensor = upload(client, &[], shape, element, Placement::Contiguous);
        Self { tensor, element }
    }

    pub(crate) fn binding(&self) -> TensorBinding {
        self.tensor.clone()
    }

    /// The binding of `[batch, heads, len, features]` that is written with each token's heads together.
    pub(crate) fn token_major(&self) -> TensorBinding {
        let strides = Placement::TokenMajor.strides(&self.tensor.shape);
        TensorBinding {
            strides: strides.into(),
            ..self.binding()
        }
    }

    /// The values that [`token_major`](Self::token_major) has received, head by head.
    pub(crate) fn read_token_major(&self, client: &Client) -> Vec<f64> {
        let &[_, heads, len, features] = &self.tensor.shape[..] else {
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

    pub(crate) fn read(&self, client: &Client) -> Vec<f64> {
        read_f64(client, self.binding(), self.element)
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
    let selection = |scores: &Vec<f64>| {
        let heads = scores.chunks(p.k_len.max(1));
        let words: Vec<u32> = heads
            .flat_map(|head| oracle::select::intervals_by_heap(head, p.window))
            .flat_map(|interval| [interval.first, interval.end])
            .collect();
        let (shape, contiguous_rows) = (p.scores_shape(), Placement::Contiguous);
        Selection {
            scores: upload(client, scores, &shape, ElementType::F32, contiguous_rows),
            intervals: contiguous(client, &words, &p.intervals_shape()),
            learning: None,
        }
    };
    Inputs {
        q: rows(&inputs.q, p.q_shape()),
        k: rows(&inputs.k, p.kv_shape()),
        v: rows(&inputs.v, p.kv_shape()),
        selection: inputs.scores.as_ref().map(selection),
    }
}

/// A comparison of a pass on inputs in a placement with the oracle, by cubes of the given units if there are some.
type Check<'a> = &'a dyn Fn(&oracle::Inputs, Placement, Option<Micro>);

/// Passes whose units share register tiles.
pub(crate) fn cooperating_units(check: Check<'_>) {
    let options = AttentionOptions::new();
    for micro in [micro(2, 2, 2, 4), micro(4, 1, 3, 4), micro(1, 2, 4, 8)] {
        let selecting = options.with_keep_window(4);
        for (scores, options, seed) in [(false, options, 3), (true, selecting, 4)] {
            let p = problem([1, 2, 13, 24], [1, 19], scores, ElementType::F32, &options);
            let inputs = inputs(p, Scores::Normal, 1.0, seed);
            check(&inputs, Placement::Contiguous, Some(micro));
        }
    }
}

pub(crate) fn every_kind_of_scores(check: Check<'_>) {
    for (seed, scores) in Scores::ALL.into_iter().enumerate() {
        for window in [1, 6, 1000] {
            let options = AttentionOptions::new().with_keep_window(window);
            let p = problem([2, 4, 50, 16], [2, 50], true, ElementType::F32, &options);
            let inputs = inputs(p, scores, 1.0, seed as u64);
            check(&inputs, Placement::Contiguous, None);
        }
    }
}

/// Fewer queries than keys, and more.
pub(crate) fn fewer_and_more_queries(check: Check<'_>) {
    for (q_len, k_len) in [(3, 70), (70, 33), (1, 1), (17, 17)] {
        for causal in [true, false] {
            let options = AttentionOptions::new()
                .with_keep_window(9)
                .with_causal(causal);
            let (q, kv) = ([1, 2, q_len, 8], [1, k_len]);
            let p = problem(q, kv, true, ElementType::F32, &options);
            let inputs = inputs(p, Scores::Normal, 1.0, 11);
            check(&inputs, Placement::TokenMajor, None);
        }
    }
}

/// Dropout, ALiBi, and with a window both.
pub(crate) fn dropout_and_alibi(check: Check<'_>) {
    for (n, (q, kv, micro, causal)) in [
        ([2, 4, 37, 16], [2, 37], None, true),
        ([1, 2, 9, 8], [1, 40], None, false),
        ([1, 2, 40, 8], [1, 9], None, true),
        ([1, 2, 9, 8], [1, 13], Some(micro(2, 2, 2, 4)), true),
        ([1, 2, 9, 8], [1, 13], Some(micro(1, 2, 4, 8)), false),
    ]
    .into_iter()
    .enumerate()
    {
        let dropout = Dropout::new([0.1, 0.6][n % 2], 1 << (15 * n)).unwrap();
        let windows = [None, Some(6)];
        for (window, alibi) in windows.into_iter().flat_map(|w| [(w, false), (w, true)]) {
            let mut options = AttentionOptions::new()
                .with_causal(causal)
                .with_dropout(dropout);
            options.keep_window = window;
            if alibi {
                options = options.with_alibi(AlibiSlopes::standard(q[1]));
                options.dropout = window.map(|_| dropout);
            }
            let p = problem(q, kv, window.is_some(), ElementType::F32, &options);
            let inputs = inputs(p, Scores::Normal, 1.0, n as u64);
            check(&inputs, Placement::Contiguous, micro);
        }
    }
}

//! The gradients of keys, gathered from the parts of each chunk of queries in a fixed order.

use crate::args::{Gradients, Selection};
use crate::host::check::elem_type;
use crate::host::scratch::{address_type, bytes, scratch};
use crate::matrix::ptx::shuffle;
use crate::pattern::intervals::chunks::{ChunkKeys, STARTS};
use crate::pattern::intervals::classes::{BRIEF_CLASSES, ChunkQueries, class_bits};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Keys per cube, one plane each.
const CUBE_KEYS: usize = 8;

/// The parts of all chunks in f32: each key of a chunk's list has a row.
#[derive(Clone, Debug)]
pub(crate) struct KeyParts {
    /// Contiguous `[batch * kv_heads, chunks, capacity, head_dim]`.
    pub k: TensorBinding,
    /// Like `k`.
    pub v: TensorBinding,
    /// Contiguous `[batch * kv_heads, chunks, capacity]`.
    pub scores: TensorBinding,
}

/// The parts of all chunks, in the order of their lists.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyPartTensors {
    pub parts_k: Box<[Vector<f32, Const<4>>]>,
    pub parts_v: Box<[Vector<f32, Const<4>>]>,
    pub parts_z: Box<[f32]>,
}

/// The gradients, which are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SummedGradients<E: Float> {
    pub grad_k: Box<[Vector<E, Const<4>>]>,
    pub grad_v: Box<[Vector<E, Const<4>>]>,
    pub grad_scores: Box<[f32]>,
}

/// Sizes of a launch of [`gather_keys_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct GatheredSizes {
    pub q_len: u32,
    pub k_len: u32,
    pub chunk: u32,
    pub chunks: u32,
    pub capacity: u32,
}

/// One plane owns a key: it looks the key up in the lists of the chunks in which it lives, one chunk per lane, and adds
/// the parts in the order of the chunks.
///
/// | buffer | layout |
/// |---|---|
/// | `parts_k`, `parts_v`, `parts_z` | see [`KeyParts`] |
/// | `intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `list`, `starts` | see [`ChunkKeys`] |
/// | `grad_k`, `grad_v` | contiguous `[batch, kv_heads, k_len, head_dim]`, overwritten |
/// | `grad_scores` | contiguous `[batch, kv_heads, k_len]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_keys_kernel<E: Float>(
    parts: &KeyPartTensors,
    intervals: &[Vector<u32, Const<2>>],
    list: &[u32],
    starts: &[u32],
    grads: &mut SummedGradients<E>,
    sizes: &GatheredSizes,
    #[comptime] head_dim: usize,
    #[comptime] causal: bool,
    #[define(E)] _element: ElemType,
) {
    let row = CUBE_POS_Y as usize;
    let key = CUBE_POS_X * comptime!(CUBE_KEYS as u32) + UNIT_POS_Y;
    let lane = UNIT_POS_X;
    if key >= sizes.k_len {
        terminate!();
    }
    let at = row * sizes.k_len as usize + key as usize;
    let interval = intervals[at];
    let (first, end) = (interval.extract(0usize), interval.extract(1usize));
    let bits = class_bits(sizes.chunk);
    let seen = ChunkQueries::all(sizes.q_len, sizes.k_len).seen(first, end, causal);
    let mut first_chunk = 0u32;
    let mut last_chunk = 0u32;
    if seen.from < seen.to {
        first_chunk = seen.from as u32 / sizes.chunk;
        last_chunk = (seen.to as u32 - 1) / sizes.chunk + 1;
    }

    let vectors = comptime!(head_dim.div_ceil(128));
    let mut dk = Array::<Vector<f32, Const<4>>>::new(vectors);
    let mut dv = Array::<Vector<f32, Const<4>>>::new(vectors);
    #[unroll]
    for n in 0..vectors {
        dk[n] = Vector::new(0.0f32);
        dv[n] = Vector::new(0.0f32);
    }
    let mut dz = 0.0f32;
    let mut block = first_chunk;
    while block < last_chunk {
        // The key's row in the parts of chunk `block + lane`.
        let own = block + lane;
        let mut part = 0u32;
        if own < last_chunk {
            let queries = ChunkQueries::of_chunk(own, sizes.chunk, sizes.q_len, sizes.k_len);
            let class = queries.class_of(&queries.seen(first, end, causal), bits);
            let item = row * sizes.chunks as usize + own as usize;
            let base = item * sizes.capacity as usize;
            let class_at = item * STARTS + class;
            let mut low = starts[class_at];
            let mut high = starts[class_at + 1];
            // The keys of a class ascend, those of brief classes descend.
            let is_brief = class >= BRIEF_CLASSES;
            while low + 1 < high {
                let middle = (low + high) / 2;
                let other = list[base + middle as usize];
                if select(is_brief, other >= key, other <= key) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            part = own * sizes.capacity + low;
        }
        let here = min(last_chunk - block, 32u32);
        for n in 0..here {
            let part =
                row * sizes.chunks as usize * sizes.capacity as usize + shuffle(part, n) as usize;
            #[unroll]
            for v in 0..vectors {
                let column = lane as usize + comptime!(v * 32);
                if column < comptime!(head_dim / 4) {
                    let from = part * comptime!(head_dim / 4) + column;
                    dk[v] += parts.parts_k[from];
                    dv[v] += parts.parts_v[from];
                }
            }
            dz += parts.parts_z[part];
        }
        block += 32u32;
    }
    #[unroll]
    for v in 0..vectors {
        let column = lane as usize + comptime!(v * 32);
        if column < comptime!(head_dim / 4) {
            let to = at * comptime!(head_dim / 4) + column;
            grads.grad_k[to] = Vector::cast_from(dk[v]);
            grads.grad_v[to] = Vector::cast_from(dv[v]);
        }
    }
    if lane == 0 {
        grads.grad_scores[at] = dz;
    }
}

impl KeyParts {
    /// The shapes of `k` and `v`, and of `scores`.
    fn shapes(problem: &Problem, chunks: usize, capacity: usize) -> ([usize; 4], [usize; 3]) {
        let rows = problem.batch * problem.kv_heads;
        let keys = [rows, chunks, capacity];
        ([rows, chunks, capacity, problem.head_dim], keys)
    }

    /// The bytes of the buffers that [`new`](Self::new) allocates.
    pub(crate) fn bytes(problem: &Problem, chunks: usize, capacity: usize) -> usize {
        let (rows, scores) = Self::shapes(problem, chunks, capacity);
        2 * bytes(rows) + bytes(scores)
    }

    pub(crate) fn new(client: &Client, problem: &Problem, chunks: usize, capacity: usize) -> Self {
        let (rows, scores) = Self::shapes(problem, chunks, capacity);
        let [k, v] = [rows; 2].map(|shape| scratch(client, shape));
        let scores = scratch(client, scores);
        Self { k, v, scores }
    }

    /// Sums the parts into the gradients of k, v and the scores: all of them are overwritten.
    pub(crate) fn gather(
        self,
        client: &Client,
        problem: &Problem,
        selection: &Selection,
        keys: &ChunkKeys,
        chunk: usize,
        grads: &Gradients,
    ) {
        let rows = problem.batch * problem.kv_heads;
        let scores = grads.scores.clone().expect("chunks come with scores");
        let starts = keys.starts.as_ref().expect("there are several chunks");
        let address = address_type([&self.k, &keys.keys, &selection.intervals, &grads.k]);
        // SAFETY: cubes past the keys return; a key that lives in a chunk is in its list, whose parts are
        // below `capacity`.
        unsafe {
            gather_keys_kernel::launch_unchecked(
                client,
                CubeCount::Static(problem.k_len.div_ceil(CUBE_KEYS) as u32, rows as u32, 1),
                CubeDim::new_2d(32, CUBE_KEYS as u32),
                address,
                KeyPartTensorsLaunch::new(
                    self.k.into_buffer_arg(),
                    self.v.into_buffer_arg(),
                    self.scores.into_buffer_arg(),
                ),
                selection.intervals.clone().into_buffer_arg(),
                keys.keys.clone().into_buffer_arg(),
                starts.clone().into_buffer_arg(),
                SummedGradientsLaunch::new(
                    grads.k.clone().into_buffer_arg(),
                    grads.v.clone().into_buffer_arg(),
                    scores.into_buffer_arg(),
                ),
                GatheredSizesLaunch::new(
                    problem.q_len as u32,
                    problem.k_len as u32,
                    chunk as u32,
                    problem.q_len.div_ceil(chunk) as u32,
                    keys.capacity as u32,
                ),
                problem.head_dim,
                problem.causal,
                elem_type(problem.element),
            );
        }
    }
}

//! Host side of the tensor-core backward pass.

use super::blueprint::{DqBlueprint, MmaBlueprints};
use super::chunks::{ChunkKeys, capacity, chunk_keys};
use super::delta::{CUBE_ROWS, delta_mma_kernel};
use super::dkdv::dkdv_mma_kernel;
use super::dq::dq_mma_kernel;
use super::gather::KeyParts;
use super::sums::{clear_sums_kernel, round_sums_kernel};
use crate::backward::order::by_death;
use crate::backward::wgmma::{dkdv_wgmma_kernel, dq_wgmma_kernel};
use crate::forward::mma::Instruction;
use crate::lists::{LiveKeys, QueryTiles, live_keys};
use crate::scratch::{one_unit_each, scratch};
use crate::tile::wgmma::{boxes_of, takes_boxes, word_boxes_of};
use crate::tile::{address_type, elem_type, fill, for_each_slice};
use crate::{Gradients, Inputs, Saved, Selection};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

impl MmaBlueprints {
    /// Cubes along each axis of the largest grids: query tiles by heads, and key tiles.
    pub(crate) fn cubes(&self, problem: &Problem) -> [usize; 3] {
        let query_tiles = problem.q_len.div_ceil(self.dq.tile.queries());
        let head_groups = problem.batch * problem.q_heads / self.dq.tile.heads;
        [
            query_tiles.max(self.key_tiles(problem)),
            head_groups.max(problem.batch * problem.kv_heads),
            1,
        ]
    }

    /// The most key tiles of all chunks and heads.
    pub(super) fn key_tiles(&self, problem: &Problem) -> usize {
        self.slots(problem) * self.chunks(problem) * problem.batch * problem.kv_heads
    }

    /// Chunks of queries.
    fn chunks(&self, problem: &Problem) -> usize {
        problem.q_len.div_ceil(self.chunk)
    }

    /// The most key tiles of a chunk.
    fn slots(&self, problem: &Problem) -> usize {
        let keys = if problem.has_scores {
            capacity(problem, self.chunk)
        } else {
            problem.k_len
        };
        keys.div_ceil(self.dkdv.keys())
    }
}

/// Launches the backward pass of a checked, non-empty problem whose rows begin at multiples of 16 bytes.
pub(crate) fn launch(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    grads: &Gradients,
    blueprints: MmaBlueprints,
) {
    let for_boxes = blueprints.dkdv.instruction == Instruction::Wgmma;
    let sums = launch_delta(client, problem, saved, for_boxes);
    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    let pass = MmaPass {
        client,
        problem,
        inputs,
        saved,
        sums: &sums,
        live: live.as_ref(),
    };
    pass.launch_dq(grads, blueprints.dq);
    pass.launch_dkdv(grads, blueprints);
}

/// What becomes of every query row before its gradients.
struct RowSums {
    /// `[batch, q_heads, q_len]`, f32.
    delta: TensorBinding,
    /// `[batch, q_heads, 2 q_len]`, f32: `-log2(e) lse` and `delta` of every query; heads begin at multiples of 16 bytes.
    /// `wgmma` only.
    rows: Option<TensorBinding>,
}

/// The row sums in new buffers.
fn launch_delta(client: &Client, problem: &Problem, saved: &Saved, for_boxes: bool) -> RowSums {
    let delta = scratch(client, problem.lse_shape());
    let [batch, heads, len] = problem.lse_shape();
    let all: usize = problem.lse_shape().iter().product();
    let rows = for_boxes.then(|| scratch(client, [batch, heads, 2 * len.next_multiple_of(2)]));
    let typed = [&saved.out, &saved.grad_out];
    let grad_lse = saved.grad_lse.as_ref().unwrap_or(&saved.lse);
    let to = rows.as_ref().unwrap_or(&delta);
    // SAFETY: rows past the last are not read; the buffers were checked to hold what is indexed.
    unsafe {
        delta_mma_kernel::launch_unchecked(
            client,
            CubeCount::Static(all.div_ceil(CUBE_ROWS) as u32, 1, 1),
            CubeDim::new_1d(256),
            address_type(&typed, problem.element.size()).max(address_type(&[&delta, to], 4)),
            saved.out.clone().into_tensor_arg(),
            saved.grad_out.clone().into_tensor_arg(),
            grad_lse.clone().into_buffer_arg(),
            saved.lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            to.clone().into_buffer_arg(),
            problem.head_dim,
            saved.grad_lse.is_some(),
            for_boxes,
            elem_type(problem.element),
        );
    }
    let rows = rows.map(|mut rows| {
        // What lies behind the last query is no row: the accelerator puts zeros there.
        rows.shape[2] = 2 * len;
        rows
    });
    RowSums { delta, rows }
}

/// What both large kernels read.
struct MmaPass<'a> {
    client: &'a Client,
    problem: &'a Problem,
    inputs: &'a Inputs,
    saved: &'a Saved,
    sums: &'a RowSums,
    live: Option<&'a LiveKeys>,
}

impl MmaPass<'_> {
    fn launch_dq(&self, grads: &Gradients, blueprint: DqBlueprint) {
        let (client, problem, inputs) = (self.client, self.problem, self.inputs);
        let size = problem.element.size();
        let head_groups = (problem.batch * problem.q_heads / blueprint.tile.heads) as u32;
        let tiles = QueryTiles::new(problem, blueprint.tile.queries());
        for_each_slice(client, problem, inputs, self.live, &tiles, |slice| {
            let Inputs { q, k, v, .. } = inputs.clone();
            let [scores, intervals, list, counts] = slice.selection;
            let typed = [&q, &k, &v, &self.saved.grad_out, &grads.q];
            let words = [&scores, &intervals, &list, &counts, &self.sums.delta];
            // One list of arguments: the kernels take the same.
            macro_rules! launch {
    ($kernel:ident, $blueprint:expr $(, $maps:expr)* $(; $boxes:expr)?) => {
        // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and
        // the lists hold keys below `k_len`.
        unsafe {
            $kernel::launch_unchecked(
                        client,
                        CubeCount::Static(slice.tiles as u32, head_groups, 1),
                        blueprint.tile.cube_dim(),
                        address_type(&typed, size).max(address_type(&words, 4)),
                        q.into_tensor_arg(),
                        k.into_tensor_arg(),
                        v.into_tensor_arg(),
                        self.saved.grad_out.clone().into_tensor_arg(),
                        scores.into_tensor_arg(),
                        intervals.into_buffer_arg(),
                        list.into_tensor_arg(),
                        counts.into_tensor_arg(),
                        self.saved.lse.clone().into_buffer_arg(),
                        self.sums.delta.clone().into_buffer_arg(),
                        grads.q.clone().into_buffer_arg(),
                        problem.scale,
                        problem.softcap.unwrap_or(1.0),
                        $($maps,)*
                        slice.first_tile as u32,
                        slice.tiles as u32,
                        $($boxes,)?
                        $blueprint,
                        elem_type(problem.element),
            )
        }
    };
}
            match blueprint.tile.instruction {
                Instruction::Mma => launch!(dq_mma_kernel, blueprint),
                Instruction::Wgmma => {
                    // Keys that lie side by side: one unit copies them for all.
                    let boxes =
                        !problem.has_scores && takes_boxes(&k, size) && takes_boxes(&v, size);
                    let [k_boxes, v_boxes] = [&k, &v].map(|tensor| {
                        boxes.then(|| boxes_of(tensor, problem.element, 1, blueprint.tile.key_tile))
                    });
                    launch!(dq_wgmma_kernel, blueprint.tile, k_boxes.into(), v_boxes.into(); boxes)
                }
            }
        });
    }

    /// The keys of each chunk; without scores buffers that are never read.
    fn chunk_keys(&self, blueprints: MmaBlueprints) -> ChunkKeys {
        let (client, problem) = (self.client, self.problem);
        match self.live {
            None => ChunkKeys {
                keys: self.inputs.q.clone(),
                counts: self.inputs.q.clone(),
                starts: self.inputs.q.clone(),
                capacity: problem.k_len,
            },
            Some(live) if blueprints.chunks(problem) > 1 => {
                chunk_keys(client, problem, live, blueprints.chunk)
            }
            // Over whole lives, neighbours are those that die together.
            Some(live) => {
                let ordered = by_death(client, problem, live);
                ChunkKeys {
                    starts: ordered.counts.clone(),
                    keys: ordered.keys,
                    counts: ordered.counts,
                    capacity: problem.k_len,
                }
            }
        }
    }

    fn launch_dkdv(&self, grads: &Gradients, blueprints: MmaBlueprints) {
        let (client, problem, blueprint) = (self.client, self.problem, blueprints.dkdv);
        let (element, words) = (elem_type(problem.element), f32::elem_type_native());
        let keys = self.chunk_keys(blueprints);
        if blueprint.parts {
            let parts = KeyParts::new(client, problem, blueprints.chunks(problem), keys.capacity);
            let to = [&parts.k, &parts.v, &parts.scores].map(Clone::clone);
            self.launch_dkdv_kernel(&keys, to, words, blueprints);
            let selection = self.inputs.selection.as_ref();
            let selection = selection.expect("chunks come with scores");
            parts.gather(client, problem, selection, &keys, blueprints.chunk, grads);
            return;
        }
        let scores = (grads.scores.clone()).unwrap_or_else(|| scratch(client, [1]));
        if problem.has_scores {
            fill(client, &scores, 0.0, words);
        }
        // Several cubes add to f32 sums; one alone writes the gradients, and visits no key that no query
        // attends to.
        if blueprint.shared_keys {
            let sums = KeySums::new(client, problem, &self.inputs.selection);
            let to = [sums.k.clone(), sums.v.clone(), scores];
            self.launch_dkdv_kernel(&keys, to, words, blueprints);
            sums.round(grads);
            return;
        }
        if problem.has_scores {
            fill(client, &grads.k, 0.0, element);
            fill(client, &grads.v, 0.0, element);
        }
        let to = [grads.k.clone(), grads.v.clone(), scores];
        self.launch_dkdv_kernel(&keys, to, element, blueprints);
    }

    fn launch_dkdv_kernel(
        &self,
        keys: &ChunkKeys,
        grads: [TensorBinding; 3],
        output: cubecl::ir::ElemType,
        blueprints: MmaBlueprints,
    ) {
        let (client, problem, blueprint) = (self.client, self.problem, blueprints.dkdv);
        let Inputs { q, k, v, selection } = self.inputs.clone();
        let (scores, intervals) = match selection {
            Some(selection) => (selection.scores, selection.intervals),
            None => (q.clone(), q.clone()),
        };
        let [grad_k, grad_v, grad_scores] = grads;
        let (chunks, slots) = (blueprints.chunks(problem), blueprints.slots(problem));
        let rows = problem.batch * problem.kv_heads;
        let typed = [&q, &k, &v, &self.saved.grad_out];
        let words = [&scores, &intervals, &keys.keys, &self.sums.delta];
        let address = address_type(&typed, problem.element.size())
            .max(address_type(&words, 4))
            .max(address_type(&[&grad_k], output.size()));
        // One list of arguments: the kernels take the same.
        macro_rules! launch {
    ($kernel:ident, $blueprint:expr $(, $boxes:expr)*) => {
        // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and
        // the lists hold keys below `k_len`.
        unsafe {
            $kernel::launch_unchecked(
                    client,
                    CubeCount::Static((slots * chunks * rows) as u32, 1, 1),
                    blueprint.cube_dim(),
                    address,
                    q.into_tensor_arg(),
                    k.into_tensor_arg(),
                    v.into_tensor_arg(),
                    self.saved.grad_out.clone().into_tensor_arg(),
                    self.saved.lse.clone().into_buffer_arg(),
                    self.sums.delta.clone().into_buffer_arg(),
                    scores.into_tensor_arg(),
                    intervals.into_buffer_arg(),
                    keys.keys.clone().into_buffer_arg(),
                    keys.counts.clone().into_buffer_arg(),
                    grad_k.into_buffer_arg(),
                    grad_v.into_buffer_arg(),
                    grad_scores.into_buffer_arg(),
                    problem.scale,
                    problem.softcap.unwrap_or(1.0),
                    $($boxes,)*
                    blueprints.chunk as u32,
                    chunks as u32,
                    slots as u32,
                    keys.capacity as u32,
                    $blueprint,
                    elem_type(problem.element),
                    output,
            )
        }
    };
}
        match blueprint.instruction {
            Instruction::Mma => launch!(dkdv_mma_kernel, blueprint),
            Instruction::Wgmma => {
                let (heads, queries) = (blueprint.heads, blueprint.queries());
                let [q_boxes, o_boxes] = [&q, &self.saved.grad_out]
                    .map(|tensor| boxes_of(tensor, problem.element, heads, queries));
                let rows = self.sums.rows.as_ref().expect("wgmma asked for them");
                let row_boxes = word_boxes_of(rows, heads, 2 * queries);
                launch!(dkdv_wgmma_kernel, blueprint, q_boxes, o_boxes, row_boxes)
            }
        }
    }
}

/// The f32 sums that the cubes of several chunks add to, `[batch, kv_heads, k_len, head_dim]` each.
struct KeySums<'a> {
    client: &'a Client,
    problem: &'a Problem,
    intervals: &'a TensorBinding,
    k: TensorBinding,
    v: TensorBinding,
}

impl<'a> KeySums<'a> {
    /// Zeros for every key that is attended to.
    fn new(client: &'a Client, problem: &'a Problem, selection: &'a Option<Selection>) -> Self {
        let selection = selection.as_ref().expect("chunks come with scores");
        let [k, v] = [(); 2].map(|()| scratch(client, problem.kv_shape()));
        let sums = Self {
            client,
            problem,
            intervals: &selection.intervals,
            k,
            v,
        };
        let (count, dim) = one_unit_each(client, sums.vectors());
        // SAFETY: units past the vectors return; the buffers hold them.
        unsafe {
            clear_sums_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(&[&sums.k], 4),
                sums.intervals.clone().into_buffer_arg(),
                sums.k.clone().into_buffer_arg(),
                sums.v.clone().into_buffer_arg(),
                sums.vectors(),
                problem.head_dim,
            );
        }
        sums
    }

    /// Vectors of four sums of each tensor.
    fn vectors(&self) -> usize {
        self.problem.kv_shape().iter().product::<usize>() / 4
    }

    /// Writes what they have come to.
    fn round(self, grads: &Gradients) {
        let (count, dim) = one_unit_each(self.client, self.vectors());
        let size = self.problem.element.size();
        let address = address_type(&[&self.k], 4).max(address_type(&[&grads.k, &grads.v], size));
        // SAFETY: units past the vectors return; the buffers hold them.
        unsafe {
            round_sums_kernel::launch_unchecked(
                self.client,
                count,
                dim,
                address,
                self.intervals.clone().into_buffer_arg(),
                self.k.clone().into_buffer_arg(),
                self.v.clone().into_buffer_arg(),
                grads.k.clone().into_buffer_arg(),
                grads.v.clone().into_buffer_arg(),
                self.vectors(),
                self.problem.head_dim,
                elem_type(self.problem.element),
            );
        }
    }
}

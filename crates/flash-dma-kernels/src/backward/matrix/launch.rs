//! Host side of the tensor-core backward pass.

use crate::args::{Gradients, Inputs, Saved, Selection};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::dkdv::shared::args::GradientTensors;
use crate::backward::dkdv::shared::gather::KeyParts;
use crate::backward::dkdv::shared::key_sums::KeySums;
use crate::backward::matrix::pass::{KeyLists, MmaPass};
use crate::host::check::elem_type;
use crate::host::fill::fill;
use crate::pattern::intervals::chunks::{ChunkKeys, Keys, chunk_keys};
use crate::pattern::intervals::order::by_death;
use crate::pattern::intervals::ranked::{RankedSource, ranked_keys};
use crate::pattern::intervals::slices::for_each_slice;
use crate::pattern::intervals::tiles::{QueryTiles, most_keys};
use crate::pattern::intervals::{LiveKeys, live_keys};
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

impl MmaBlueprints {
    /// Cubes along each axis of the largest grids: query tiles by heads, and key tiles.
    pub(crate) fn cubes(&self, problem: &Problem) -> [usize; 3] {
        let query_tiles = problem.q_len.div_ceil(self.dq.tile.queries());
        let head_groups = problem.batch * problem.q_heads / self.dq.tile.heads;
        // As many as there could be keys whose ranks learn.
        let rank = self.rank.map_or(0, |rank| {
            let tiles = problem.k_len.div_ceil(rank.tiles.keys());
            tiles * rank.chunks(problem) * problem.batch * problem.kv_heads
        });
        [
            query_tiles.max(self.key_tiles(problem)).max(rank),
            head_groups.max(problem.batch * problem.kv_heads),
            1,
        ]
    }

    /// The most key tiles of all chunks and heads.
    pub(crate) fn key_tiles(&self, problem: &Problem) -> usize {
        self.tiles_each(problem) * self.chunks(problem) * problem.batch * problem.kv_heads
    }

    /// Chunks of queries.
    pub(crate) fn chunks(&self, problem: &Problem) -> usize {
        problem.q_len.div_ceil(self.chunk)
    }

    /// The most key tiles of a chunk.
    pub(crate) fn tiles_each(&self, problem: &Problem) -> usize {
        let keys = if problem.has_scores {
            most_keys(problem, self.chunk)
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
    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    let rows = [&inputs.q, &inputs.k, &inputs.v];
    let pass = SelectedPass {
        pass: MmaPass::new(client, problem, rows, saved, blueprints),
        inputs,
        live: live.as_ref(),
    };
    let tiles = QueryTiles::new(problem, blueprints.dq.tile.queries());
    let results = [&grads.q];
    for_each_slice(
        client,
        problem,
        inputs,
        pass.live,
        &tiles,
        &results,
        |slice| {
            pass.pass.launch_dq(slice.into(), &grads.q, blueprints.dq);
        },
    );
    pass.launch_dkdv(grads, blueprints);
    pass.launch_rank(grads, blueprints);
}

/// A backward pass over the keys that the scores select, or over all.
struct SelectedPass<'a> {
    pass: MmaPass<'a>,
    inputs: &'a Inputs,
    live: Option<&'a LiveKeys>,
}

impl SelectedPass<'_> {
    /// The keys of each chunk, with scores.
    fn chunk_keys(&self, live: &LiveKeys, blueprints: MmaBlueprints) -> ChunkKeys {
        let (client, problem) = (self.pass.client, self.pass.problem);
        if blueprints.chunks(problem) > 1 {
            return chunk_keys(client, problem, Keys::Live(live), blueprints.chunk);
        }
        // Over whole lifetimes, the keys that die together are neighbours.
        let ordered = by_death(client, problem, live);
        ChunkKeys {
            keys: ordered.keys,
            counts: ordered.counts,
            starts: None,
            capacity: ordered.capacity,
        }
    }

    fn launch_dkdv(&self, grads: &Gradients, blueprints: MmaBlueprints) {
        let (client, problem, blueprint) = (self.pass.client, self.pass.problem, blueprints.dkdv);
        let (element, words) = (elem_type(problem.element), f32::elem_type_native());
        let keys = self.live.map(|live| self.chunk_keys(live, blueprints));
        if blueprint.parts {
            let listed = keys.as_ref().expect("chunks come with scores");
            let chunks = blueprints.chunks(problem);
            let parts = KeyParts::new(client, problem, chunks, listed.capacity);
            let to = [&parts.k, &parts.v].map(GradientTensors::of);
            let scores = Some(parts.scores.clone());
            self.launch_kernel(keys.as_ref(), to, scores, words, blueprints);
            let selection = self.inputs.selection.as_ref();
            let selection = selection.expect("chunks come with scores");
            parts.gather(client, problem, selection, listed, blueprints.chunk, grads);
            return;
        }
        if let Some(scores) = &grads.scores {
            fill(client, scores, 0.0, words);
        }
        let (keys, scores) = (keys.as_ref(), grads.scores.clone());
        // Several cubes add to f32 sums; a single cube writes the gradients, and skips keys that no query attends to.
        if blueprint.shared_keys {
            let sums = KeySums::new(client, problem, &self.inputs.selection, blueprints.chunk);
            self.launch_kernel(keys, sums.beside(grads), scores, element, blueprints);
            sums.round(grads);
            return;
        }
        if problem.has_scores {
            fill(client, &grads.k, 0.0, element);
            fill(client, &grads.v, 0.0, element);
        }
        let to = [&grads.k, &grads.v].map(GradientTensors::of);
        self.launch_kernel(keys, to, scores, element, blueprints);
    }

    /// The gradient of the rank, if one learns; all other keys get zero.
    fn launch_rank(&self, grads: &Gradients, blueprints: MmaBlueprints) {
        let (Some(selection), Some(rank)) = (&self.inputs.selection, &grads.rank) else {
            return;
        };
        let far = selection.far.as_ref().expect("a rank comes with it");
        fill(self.pass.client, rank, 0.0, f32::elem_type_native());
        let runners_up = self.ranked(selection, RankedSource::RunnersUp(&far.ends), blueprints);
        let blueprint = blueprints.rank.expect("a rank comes with scores");
        self.pass.launch_rank(runners_up, None, rank, blueprint);
        if let Some(left_out) = &far.left_out {
            let kept = self.ranked(selection, RankedSource::Kept(&left_out.from), blueprints);
            let how = Some(left_out.how);
            self.pass.launch_rank(kept, how, rank, blueprint);
        }
    }

    /// The keys of `selection`, which has a [`Far`](crate::args::Far), whose ranks learn.
    fn ranked(
        &self,
        selection: &Selection,
        source: RankedSource,
        blueprints: MmaBlueprints,
    ) -> KeyLists {
        let (client, problem) = (self.pass.client, self.pass.problem);
        let blueprint = blueprints.rank.expect("a rank comes with scores");
        let ranked = ranked_keys(client, problem, selection, source);
        let chunks = blueprint.chunks(problem);
        let (keys, counts, capacity) = if chunks > 1 {
            let max_live = match (source, &selection.far) {
                (RankedSource::RunnersUp(_), Some(far)) => far.max_live,
                _ => problem.window,
            };
            let keys = Keys::Ranked(&ranked, max_live);
            let listed = chunk_keys(client, problem, keys, blueprint.chunk);
            (listed.keys, listed.counts, listed.capacity)
        } else {
            ranked.order_tiles(client, problem, blueprint.tiles.keys());
            (ranked.keys, ranked.counts, problem.k_len)
        };
        KeyLists {
            source: SourceTensors {
                bias: Some(selection.scores.clone()),
                keys: KeyTensors::Intervals([ranked.spans, keys, counts]),
            },
            capacity,
            chunks,
            tiles: capacity.div_ceil(blueprint.tiles.keys()),
        }
    }

    fn launch_kernel(
        &self,
        keys: Option<&ChunkKeys>,
        grads: [GradientTensors; 2],
        grad_scores: Option<TensorBinding>,
        output: ElemType,
        blueprints: MmaBlueprints,
    ) {
        let problem = self.pass.problem;
        let selected = self.inputs.selection.clone().zip(keys);
        let (bias, keys, capacity) = match selected {
            Some((selection, keys)) => {
                let buffers = [selection.intervals, keys.keys.clone(), keys.counts.clone()];
                let listed = KeyTensors::Intervals(buffers);
                (Some(selection.scores), listed, keys.capacity)
            }
            None => (None, KeyTensors::All, problem.k_len),
        };
        let lists = KeyLists {
            source: SourceTensors { bias, keys },
            capacity,
            chunks: blueprints.chunks(problem),
            // As many as the lists may fill: any other bound could silently drop keys.
            tiles: capacity.div_ceil(blueprints.dkdv.keys()),
        };
        self.pass
            .launch_dkdv(lists, grads, grad_scores, output, blueprints);
    }
}

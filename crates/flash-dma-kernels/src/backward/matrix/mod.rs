//! The host side of the backward pass on tensor cores.

pub(crate) mod pass;

use crate::args::{Gradients, Inputs, Saved, Selection};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::dkdv::blueprint::ChunkedBlueprint;
use crate::backward::dkdv::shared::args::GradientTensors;
use crate::backward::dkdv::shared::gather::KeyParts;
use crate::backward::dkdv::shared::key_sums::KeySums;
use crate::backward::matrix::pass::{KeyLists, MmaPass, row_sums_bytes};
use crate::host::check::elem_type;
use crate::host::fill::fill;
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::chunks::{ChunkKeys, Keys, chunk_keys};
use crate::pattern::intervals::order::{OrderedKeys, by_death};
use crate::pattern::intervals::ranked::{RankedKeys, RankedSource, ranked_keys, sources};
use crate::pattern::intervals::slices::{SelectedKeys, slice_bytes};
use crate::pattern::intervals::tiles::most_keys;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

impl MmaBlueprints {
    /// Cubes along each axis of the largest grids: query tiles by heads, and key tiles.
    pub(crate) fn cubes(&self, problem: &Problem) -> [usize; 3] {
        let query_tiles = problem.q_len.div_ceil(self.dq.tile.queries());
        let head_groups = problem.batch * problem.q_heads / self.dq.tile.heads;
        // As many tiles as there could be keys whose ranks learn.
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
        let ChunkedBlueprint { tiles, chunk } = self.dkdv;
        let keys = if problem.has_scores {
            most_keys(problem, chunk)
        } else {
            problem.k_len
        };
        let each = keys.div_ceil(tiles.keys());
        each * self.dkdv.chunks(problem) * problem.batch * problem.kv_heads
    }

    /// The most bytes of buffers that [`launch`] holds at once.
    pub(crate) fn workspace(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        // Live keys and row sums are held to the end; the lists of dq are freed before those of dk and dv are made, and
        // those before the lists of the keys whose ranks learn, which exist one at a time.
        let dq = slice_bytes(problem, self.dq.tile.queries());
        let keys = (self.key_bytes(problem)).max(self.rank_bytes(problem, selection));
        LiveKeys::bytes(problem) + row_sums_bytes(problem, *self) + dq.max(keys)
    }

    /// Bytes of the lists of keys whose ranks learn and, with several chunks, of each chunk; kept keys need no more.
    fn rank_bytes(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        let learning = selection.and_then(|selection| selection.learning.as_ref());
        let (Some(learning), Some(rank)) = (learning, self.rank) else {
            return 0;
        };
        let chunked = match rank.chunks(problem) {
            1 => 0,
            _ => ChunkKeys::bytes(problem, learning.max_live, rank.chunk),
        };
        RankedKeys::bytes(problem, selection) + chunked
    }

    /// Bytes of the keys of each chunk, and of the sums or parts of keys with several chunks.
    fn key_bytes(&self, problem: &Problem) -> usize {
        let ChunkedBlueprint { tiles, chunk } = self.dkdv;
        let chunks = self.dkdv.chunks(problem);
        let listed = match chunks {
            _ if !problem.has_scores => 0,
            1 => OrderedKeys::bytes(problem),
            _ => ChunkKeys::bytes(problem, problem.window, chunk),
        };
        listed
            + match (tiles.parts, tiles.shared_keys) {
                (true, _) => KeyParts::bytes(problem, chunks, most_keys(problem, chunk)),
                (false, true) => KeySums::bytes(problem),
                (false, false) => 0,
            }
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
    let keys = SelectedKeys::new(client, problem, inputs);
    let pass = MmaPass::new(client, problem, inputs.rows(), saved, blueprints);
    for tiles in keys.slices(blueprints.dq.tile.queries(), [&grads.q]) {
        pass.launch_dq(tiles, &grads.q);
    }
    pass.launch_keys(&keys, grads);
    pass.launch_ranks(&keys, grads);
}

impl MmaPass<'_> {
    /// The keys of each chunk, with scores.
    fn chunk_keys(&self, live: &LiveKeys) -> ChunkKeys {
        let (client, problem, dkdv) = (self.client, self.problem, self.blueprints.dkdv);
        if dkdv.chunks(problem) > 1 {
            return chunk_keys(client, problem, Keys::Live(live), dkdv.chunk);
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

    /// The gradients of k, v and the scores.
    fn launch_keys(&self, keys: &SelectedKeys, grads: &Gradients) {
        let (client, problem, dkdv) = (self.client, self.problem, self.blueprints.dkdv);
        let (element, words) = (elem_type(problem.element), f32::elem_type_native());
        let selected = keys.selection.as_ref();
        let selected = selected.map(|(selection, live)| (*selection, self.chunk_keys(live)));
        let (source, capacity) = match &selected {
            Some((selection, listed)) => {
                let (keys, counts) = (listed.keys.clone(), listed.counts.clone());
                let source = SourceTensors {
                    bias: Some(selection.scores.clone()),
                    keys: KeyTensors::Intervals([selection.intervals.clone(), keys, counts]),
                    kept_from: (selection.learning.as_ref())
                        .filter(|_| dkdv.tiles.kept)
                        .and_then(|learning| learning.kept_from.clone()),
                };
                (source, listed.capacity)
            }
            None => (SourceTensors::default(), problem.k_len),
        };
        let lists = KeyLists {
            source,
            capacity,
            chunks: dkdv.chunks(problem),
            // As many tiles as the lists may fill: any other bound could silently drop keys.
            tiles: capacity.div_ceil(dkdv.tiles.keys()),
        };
        if dkdv.tiles.parts {
            let (selection, listed) = selected.as_ref().expect("chunks come with scores");
            let parts = KeyParts::new(client, problem, lists.chunks, capacity);
            let to = [&parts.k, &parts.v].map(GradientTensors::of);
            self.launch_dkdv(lists, to, Some(parts.scores.clone()), words);
            parts.gather(client, problem, selection, listed, dkdv.chunk, grads);
            return;
        }
        // What the kernel sums for each key.
        let scores = match dkdv.tiles.kept {
            true => grads.rank.clone(),
            false => grads.scores.clone(),
        };
        if let Some(scores) = &scores {
            fill(client, scores, 0.0, words);
        }
        // Several cubes add to f32 sums; a single cube writes the gradients, and skips keys that no query attends to.
        if dkdv.tiles.shared_keys {
            let (selection, _) = selected.as_ref().expect("chunks come with scores");
            let sums = KeySums::new(client, problem, selection, dkdv.chunk);
            self.launch_dkdv(lists, sums.with_gradients(grads), scores, element);
            sums.round(grads);
            return;
        }
        if problem.has_scores {
            fill(client, &grads.k, 0.0, element);
            fill(client, &grads.v, 0.0, element);
        }
        let to = [&grads.k, &grads.v].map(GradientTensors::of);
        self.launch_dkdv(lists, to, scores, element);
    }

    /// The gradient of the rank, if it is learned; all other keys get zero. What kept keys learn is there already if the
    /// dk/dv kernel summed it.
    fn launch_ranks(&self, keys: &SelectedKeys, grads: &Gradients) {
        let (Some((selection, _)), Some(rank)) = (&keys.selection, &grads.rank) else {
            return;
        };
        let (client, problem) = (self.client, self.problem);
        let learning = selection.learning.as_ref().expect("a rank comes with it");
        let blueprint = self.blueprints.rank.expect("a rank comes with scores");
        let chunks = blueprint.chunks(problem);
        let in_dkdv = self.blueprints.dkdv.tiles.kept;
        if !in_dkdv {
            fill(client, rank, 0.0, f32::elem_type_native());
        }
        let left = |source: &RankedSource| !(in_dkdv && matches!(source, RankedSource::Kept(_)));
        for (n, source) in sources(learning).filter(left).enumerate() {
            let ranked = ranked_keys(client, problem, selection, source);
            let (keys, counts, capacity) = if chunks > 1 {
                let max_live = match source {
                    RankedSource::RunnersUp(_) => learning.max_live,
                    RankedSource::Kept(_) => problem.window,
                };
                let keys = Keys::Ranked(&ranked, max_live);
                let listed = chunk_keys(client, problem, keys, blueprint.chunk);
                (listed.keys, listed.counts, listed.capacity)
            } else {
                ranked.order_tiles(client, problem, blueprint.tiles.keys());
                (ranked.keys, ranked.counts, problem.k_len)
            };
            let lists = KeyLists {
                source: SourceTensors {
                    bias: Some(selection.scores.clone()),
                    keys: KeyTensors::Intervals([ranked.spans, keys, counts]),
                    kept_from: None,
                },
                capacity,
                chunks,
                tiles: capacity.div_ceil(blueprint.tiles.keys()),
            };
            self.launch_rank(lists, source, in_dkdv || n > 0, rank, blueprint);
        }
    }
}

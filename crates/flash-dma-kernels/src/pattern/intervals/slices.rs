//! The keys that a pass without a mask reads, and launches of its kernels that own query tiles: one launch for dense
//! attention, one per slice of key lists for sparse attention.

use crate::args::{Inputs, Selection};
use crate::host::faults::Seal;
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, TileKeyLists, live_keys, tile_key_lists};
use crate::pattern::tensors::{KeyTensors, SourceTensors, TileLaunch};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::Problem;

/// The keys that a call's scores select, or all keys.
pub(crate) struct SelectedKeys<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    /// Given with scores.
    pub selection: Option<(&'a Selection, LiveKeys)>,
}

/// The bytes of the buffers that [`for_each_slice`] holds at once, for tiles of `queries` queries.
pub(crate) fn slice_bytes(problem: &Problem, queries: usize) -> usize {
    if !problem.has_scores {
        return 0;
    }
    TileKeyLists::bytes(problem, &QueryTiles::new(problem, queries))
}

impl<'a> SelectedKeys<'a> {
    /// Lists the live keys, if there are scores.
    pub(crate) fn new(client: &'a Client, problem: &'a Problem, inputs: &'a Inputs) -> Self {
        let selection = inputs.selection.as_ref();
        let selection = selection.map(|given| (given, live_keys(client, problem, given)));
        Self {
            client,
            problem,
            selection,
        }
    }

    /// Calls `launch` for each slice of tiles of `queries` queries. Each call writes a part of every one of `results`;
    /// if a slice fails, they carry the failure regardless of later slices.
    pub(crate) fn for_each_slice(
        &self,
        queries: usize,
        results: &[&TensorBinding],
        mut launch: impl FnMut(TileLaunch),
    ) {
        let (client, problem) = (self.client, self.problem);
        let tiles = QueryTiles::new(problem, queries);
        let Some((selection, live)) = &self.selection else {
            return launch(TileLaunch {
                source: SourceTensors::default(),
                first: 0,
                count: tiles.count,
            });
        };
        let slices: Vec<_> = tiles.slices(problem.batch * problem.kv_heads).collect();
        let seal = (slices.len() > 1).then(|| Seal::new(client));
        for slice in slices {
            let lists = tile_key_lists(client, problem, live, &tiles, slice.clone());
            let intervals = selection.intervals.clone();
            launch(TileLaunch {
                source: SourceTensors {
                    bias: Some(selection.scores.clone()),
                    keys: KeyTensors::Intervals([intervals, lists.keys, lists.counts]),
                    kept_from: None,
                },
                first: slice.start,
                // Without causal masking all tiles share the one list.
                count: match problem.causal {
                    true => slice.len(),
                    false => tiles.count,
                },
            });
            if let Some(seal) = &seal {
                results.iter().for_each(|result| seal.note(result));
            }
        }
        if let Some(seal) = seal {
            results.iter().for_each(|result| seal.close(result));
        }
    }
}

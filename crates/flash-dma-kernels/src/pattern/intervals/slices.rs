//! Launches of the kernels that own query tiles: one launch for dense attention, one per slice of key lists for sparse
//! attention.

use crate::args::Inputs;
use crate::host::faults::Seal;
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, TileKeyLists, tile_key_lists};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::Problem;

/// The key source of one launch of a query-outer kernel, and the tiles that it covers.
pub(crate) struct Slice {
    /// Scores, intervals, key lists and their counts, if there are scores.
    pub selection: Option<[TensorBinding; 4]>,
    /// The first query tile.
    pub first_tile: usize,
    /// Query tiles, the size of the grid along x.
    pub tiles: usize,
}

/// The bytes of the buffers that [`for_each_slice`] holds at once, for tiles of `queries` queries.
pub(crate) fn slice_bytes(problem: &Problem, queries: usize) -> usize {
    if !problem.has_scores {
        return 0;
    }
    TileKeyLists::bytes(problem, &QueryTiles::new(problem, queries))
}

/// Calls `launch` for each slice of query tiles. Each call writes a part of every one of `results`; if a slice fails,
/// they carry the failure regardless of later slices.
pub(crate) fn for_each_slice(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    live: Option<&LiveKeys>,
    tiles: &QueryTiles,
    results: &[&TensorBinding],
    mut launch: impl FnMut(Slice),
) {
    let (Some(selection), Some(live)) = (&inputs.selection, live) else {
        return launch(Slice {
            selection: None,
            first_tile: 0,
            tiles: tiles.count,
        });
    };
    let slices: Vec<_> = tiles.slices(problem.batch * problem.kv_heads).collect();
    let seal = (slices.len() > 1).then(|| Seal::new(client));
    for slice in slices {
        let lists = tile_key_lists(client, problem, live, tiles, slice);
        launch(Slice {
            selection: Some([
                selection.scores.clone(),
                selection.intervals.clone(),
                lists.keys,
                lists.counts,
            ]),
            first_tile: lists.slice.start,
            // Without causal masking all tiles share the one list.
            tiles: if problem.causal {
                lists.slice.len()
            } else {
                tiles.count
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

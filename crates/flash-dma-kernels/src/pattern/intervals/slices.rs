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
use std::ops::Range;
use std::{iter, mem, vec};

/// The keys that a call's scores select, or all keys.
pub(crate) struct SelectedKeys<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    /// Given with scores.
    pub selection: Option<(&'a Selection, LiveKeys)>,
}

/// The bytes of the buffers that [`SelectedKeys::slices`] holds at once, for tiles of `queries` queries.
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

    /// The slices of tiles of `queries` queries, for one launch each. Each launch writes a part of every one of
    /// `results`: if one fails, they carry the failure regardless of later launches.
    pub(crate) fn slices<'b>(
        &'b self,
        queries: usize,
        results: impl IntoIterator<Item = &'b TensorBinding>,
    ) -> Slices<'b> {
        let tiles = QueryTiles::new(self.problem, queries);
        let rows = self.problem.batch * self.problem.kv_heads;
        let ranges: Vec<_> = match &self.selection {
            None => iter::once(0..tiles.count).collect(),
            Some(_) => tiles.slices(rows).collect(),
        };
        let in_parts = ranges.len() > 1;
        Slices {
            keys: self,
            tiles,
            seal: in_parts.then(|| (Seal::new(self.client), results.into_iter().collect())),
            ranges: ranges.into_iter(),
            launched: false,
        }
    }
}

/// The slices of a pass's query tiles, whose lists are made when their turn comes.
pub(crate) struct Slices<'a> {
    keys: &'a SelectedKeys<'a>,
    tiles: QueryTiles,
    ranges: vec::IntoIter<Range<usize>>,
    /// Given with more than one slice: it notes the results after each launch, and closes them after the last.
    seal: Option<(Seal<'a>, Vec<&'a TensorBinding>)>,
    launched: bool,
}

impl Iterator for Slices<'_> {
    type Item = TileLaunch;

    fn next(&mut self) -> Option<TileLaunch> {
        let range = self.ranges.next();
        if let Some((seal, results)) = &self.seal {
            if mem::replace(&mut self.launched, true) {
                results.iter().for_each(|result| seal.note(result));
            }
            if range.is_none() {
                results.iter().for_each(|result| seal.close(result));
            }
        }
        let range = range?;
        let SelectedKeys {
            client, problem, ..
        } = *self.keys;
        Some(match &self.keys.selection {
            None => TileLaunch {
                source: SourceTensors::default(),
                first: range.start,
                count: range.len(),
            },
            Some((selection, live)) => {
                let lists = tile_key_lists(client, problem, live, &self.tiles, range.clone());
                let intervals = selection.intervals.clone();
                TileLaunch {
                    source: SourceTensors {
                        bias: Some(selection.scores.clone()),
                        keys: KeyTensors::Intervals([intervals, lists.keys, lists.counts]),
                        kept_from: None,
                    },
                    first: range.start,
                    // Without causal masking all tiles share the one list.
                    count: match problem.causal {
                        true => range.len(),
                        false => self.tiles.count,
                    },
                }
            }
        })
    }
}

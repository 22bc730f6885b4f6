//! The keys that a tile of work touches: compact lists, built on the device from the intervals.
//!
//! [`live_keys`] drops the keys that no position attends to; [`tile_key_lists`] lists, for every
//! query tile, the keys that some query of the tile attends to. Neither reads anything back to the
//! host, so every buffer is sized for the worst case that the window allows: the most keys
//! that are alive at one position. Any number of them may die at once.

pub(crate) mod chunks;
pub(crate) mod classes;
pub(crate) mod live;
pub(crate) mod order;
pub(crate) mod ranked;
pub(crate) mod slices;
#[cfg(test)]
mod tests;
pub(crate) mod tile_keys;
pub(crate) mod tiles;

use crate::args::Selection;
use crate::host::scratch::{address_type, bytes, cubes, scratch};
use crate::team::Team;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::Problem;
use live::live_keys_kernel;
use std::ops::Range;
use tile_keys::{TileKeysBlueprint, TileListSizesLaunch, tile_keys_kernel};
use tiles::QueryTiles;

/// Planes per cube that lists the live keys of a row.
const ROW_PLANES: usize = 32;

/// Planes per cube that lists the keys of tiles, and thus tiles per cube, given the number of all lists. Planes share
/// the reads of the live list, but with few lists large cubes would leave a GPU idle.
fn tile_planes(lists: usize) -> usize {
    if lists < 4096 { 8 } else { 16 }
}

/// The keys that at least one position attends to, for each of the `batch * kv_heads` rows.
#[derive(Clone, Debug)]
pub(crate) struct LiveKeys {
    /// Contiguous `[batch * kv_heads, 2, k_len]`, pairs of u32: the intervals of the live keys, ascending, and of those
    /// that live longer than [`live::BRIEF`] positions; undefined past their counts. An interval begins at its key.
    pub entries: TensorBinding,
    /// Contiguous `[batch * kv_heads]`, u32: the number of live keys of the row.
    pub counts: TensorBinding,
    /// Contiguous `[batch * kv_heads, blocks, 2]`, u32: the number of entries in either list before each block of
    /// [`live::BLOCK`] keys.
    pub starts: TensorBinding,
}

impl LiveKeys {
    /// The shapes of `entries`, `counts` and `starts`.
    fn shapes(problem: &Problem) -> ([usize; 4], [usize; 1], [usize; 3]) {
        let rows = problem.batch * problem.kv_heads;
        let blocks = problem.k_len.div_ceil(live::BLOCK);
        ([rows, 2, problem.k_len, 2], [rows], [rows, blocks, 2])
    }

    /// The bytes of the buffers that [`live_keys`] allocates; 0 without scores.
    pub(crate) fn bytes(problem: &Problem) -> usize {
        if !problem.has_scores {
            return 0;
        }
        let (entries, counts, starts) = Self::shapes(problem);
        bytes(entries) + bytes(counts) + bytes(starts)
    }

    /// The launch argument of kernels that write or read them.
    fn lists(&self) -> live::LiveListsLaunch {
        let [entries, counts, starts] = [&self.entries, &self.counts, &self.starts]
            .map(|binding| binding.clone().into_buffer_arg());
        live::LiveListsLaunch::new(entries, counts, starts)
    }
}

/// The keys of a slice of query tiles, for each of the `batch * kv_heads` rows; axis 1 counts from the slice's start.
///
/// A tile's list holds first the keys that every query of the tile attends to (*full* keys), then the keys that only
/// some queries attend to (*boundary* keys), both by ascending index. Only boundary keys need the interval test.
#[derive(Clone, Debug)]
pub(crate) struct TileKeyLists {
    /// Contiguous `[batch * kv_heads, slice.len(), capacity]`, u32: key indices, with [`QueryTiles::capacity`] entries
    /// per list; undefined past the total.
    pub keys: TensorBinding,
    /// Contiguous `[batch * kv_heads, slice.len(), 2]`, u32: the number of full keys, and of all keys.
    /// `full <= total <= capacity` whatever the intervals hold.
    pub counts: TensorBinding,
}

impl TileKeyLists {
    fn shapes(problem: &Problem, tiles: &QueryTiles, listed: usize) -> [[usize; 3]; 2] {
        let rows = problem.batch * problem.kv_heads;
        [[rows, listed, tiles.capacity], [rows, listed, 2]]
    }

    /// The bytes that [`tile_key_lists`] allocates for the largest of the slices, which share them.
    pub(crate) fn bytes(problem: &Problem, tiles: &QueryTiles) -> usize {
        let of = |slice: Range<usize>| Self::shapes(problem, tiles, slice.len()).map(bytes);
        // The first slice is the largest.
        let first = tiles.slices(problem.batch * problem.kv_heads).next();
        first.map_or(0, |slice| of(slice).iter().sum())
    }
}

/// Lists the live keys of every row, in one launch.
///
/// Each interval must begin at its key, and at most `problem.window` of a row may hold any one position. Whatever they
/// hold, nothing is read or written out of bounds.
pub(crate) fn live_keys(client: &Client, problem: &Problem, selection: &Selection) -> LiveKeys {
    live_keys_with(client, problem, selection, Team::new(client, ROW_PLANES))
}

fn live_keys_with(
    client: &Client,
    problem: &Problem,
    selection: &Selection,
    team: Team,
) -> LiveKeys {
    let (rows, n) = (problem.batch * problem.kv_heads, problem.k_len);
    let (entries, counts, starts) = LiveKeys::shapes(problem);
    let out = LiveKeys {
        entries: scratch(client, entries),
        counts: scratch(client, counts),
        starts: scratch(client, starts),
    };
    if rows == 0 {
        return out;
    }
    let dim = team.cube_dim();
    // SAFETY: cubes past `rows` return; the intervals hold `[rows, n, 2]`, and a live key's place is at
    // most its own index. Without keys nothing is read, and the counts are 0.
    unsafe {
        live_keys_kernel::launch_unchecked(
            client,
            cubes(client, rows, dim),
            dim,
            address_type([&selection.intervals, &out.entries]),
            selection.intervals.clone().into_buffer_arg(),
            out.lists(),
            rows as u32,
            n as u32,
            team,
        );
    }
    out
}

/// Lists the keys of the query tiles in `slice`, one of [`QueryTiles::slices`], in one launch.
pub(crate) fn tile_key_lists(
    client: &Client,
    problem: &Problem,
    live: &LiveKeys,
    tiles: &QueryTiles,
    slice: Range<usize>,
) -> TileKeyLists {
    let rows = problem.batch * problem.kv_heads;
    let team = Team::new(client, tile_planes(rows * slice.len()));
    tile_key_lists_with(client, problem, live, tiles, slice, team)
}

fn tile_key_lists_with(
    client: &Client,
    problem: &Problem,
    live: &LiveKeys,
    tiles: &QueryTiles,
    slice: Range<usize>,
    team: Team,
) -> TileKeyLists {
    let (rows, n) = (problem.batch * problem.kv_heads, problem.k_len);
    let [keys, counts] = TileKeyLists::shapes(problem, tiles, slice.len());
    let lists = TileKeyLists {
        keys: scratch(client, keys),
        counts: scratch(client, counts),
    };
    if rows * slice.len() == 0 {
        return lists;
    }
    // Without causal masking all queries share one list: the list of a single query at the last key.
    let (tile_size, q_len, offset) = if problem.causal {
        (tiles.size, problem.q_len, problem.position(0))
    } else {
        (1, 1, problem.k_len as i64 - 1)
    };
    let blueprint = TileKeysBlueprint::new(team, tile_size);
    let groups = slice.len().div_ceil(team.planes);
    let dim = team.cube_dim();
    // SAFETY: cubes past the groups return; live counts are at most `n`, and the kernel writes only
    // below `capacity`.
    unsafe {
        tile_keys_kernel::launch_unchecked(
            client,
            cubes(client, rows * groups, dim),
            dim,
            address_type([&live.entries, &lists.keys]),
            live.lists(),
            lists.keys.clone().into_buffer_arg(),
            lists.counts.clone().into_buffer_arg(),
            TileListSizesLaunch::new(
                rows as u32,
                n as u32,
                slice.start as u32,
                slice.len() as u32,
                tile_size as u32,
                q_len as u32,
                offset as i32,
                tiles.capacity as u32,
            ),
            blueprint,
        );
    }
    lists
}

/// Builds and drops the lists of a [forward pass](crate::forward::Forward::plan_forward) in tiles of `queries`, for benchmarks: all of
/// its launches except the attention kernel. `problem` must have scores, and `selection` must fit it.
#[cfg(feature = "internals")]
pub fn list_all(client: &Client, problem: &Problem, selection: &Selection, queries: usize) {
    let live = live_keys(client, problem, selection);
    let tiles = QueryTiles::new(problem, queries);
    for slice in tiles.slices(problem.batch * problem.kv_heads) {
        tile_key_lists(client, problem, &live, &tiles, slice);
    }
}

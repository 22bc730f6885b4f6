//! Host side of the lists: buffers and launches.

use crate::args::Selection;
use crate::host::scratch::{address_type, cubes, scratch};
use crate::pattern::intervals::live::live_keys_kernel;
use crate::pattern::intervals::tile_keys::{
    TileKeysBlueprint, TileListSizesLaunch, tile_keys_kernel,
};
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, TileKeyLists};
use crate::team::Team;
use cubecl::client::Client;
use flash_dma_problem::Problem;
use std::ops::Range;

/// Planes per cube that lists the live keys of a row.
pub(crate) const ROW_PLANES: usize = 32;

/// Planes per cube that lists the keys of tiles, and thus tiles per cube, given the number of all lists. Planes share
/// the reads of the live list, but with few lists large cubes would leave a GPU idle.
pub(crate) fn tile_planes(lists: usize) -> usize {
    if lists < 4096 { 8 } else { 16 }
}

pub(crate) fn live_keys(
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

pub(crate) fn tile_key_lists(
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
        slice: slice.clone(),
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

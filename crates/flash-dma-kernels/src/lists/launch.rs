//! Host side of the lists: buffers, and which kernels run in which order.

use super::live::{self, count_live_kernel, scan_live_kernel, write_live_kernel};
use super::tile_keys::{
    self, count_tile_keys_kernel, scan_tile_keys_kernel, write_tile_keys_kernel,
};
use super::{LiveKeys, QueryTiles, TileKeyLists};
use crate::Selection;
use crate::scratch::{address_type, one_unit_each, scratch};
use cubecl::client::Client;
use flash_dma_problem::Problem;
use std::ops::Range;

pub(super) fn live_keys(client: &Client, problem: &Problem, selection: &Selection) -> LiveKeys {
    let (rows, n) = (problem.batch * problem.kv_heads, problem.k_len);
    let out = LiveKeys {
        keys: scratch(client, [rows, n]),
        ends: scratch(client, [rows, n]),
        counts: scratch(client, [rows]),
    };
    if rows == 0 {
        return out;
    }
    let chunks = n.div_ceil(live::CHUNK as usize);
    let before = scratch(client, [rows, chunks]);
    let address = address_type([&selection.intervals]);
    if n > 0 {
        let (count, dim) = one_unit_each(client, rows * chunks);
        // SAFETY: units past `rows * chunks` return; the intervals hold `[rows, n, 2]`.
        unsafe {
            count_live_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                selection.intervals.clone().into_buffer_arg(),
                before.clone().into_buffer_arg(),
                rows as u32,
                n as u32,
            );
        }
    }
    let (count, dim) = one_unit_each(client, rows);
    // SAFETY: units past `rows` return. Without keys there are no chunks, and the counts are 0.
    unsafe {
        scan_live_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            before.clone().into_buffer_arg(),
            out.counts.clone().into_buffer_arg(),
            rows as u32,
            chunks as u32,
        );
    }
    if n > 0 {
        let (count, dim) = one_unit_each(client, rows * n);
        // SAFETY: units past `rows * n` return; a live key's place is at most its own index.
        unsafe {
            write_live_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                selection.intervals.clone().into_buffer_arg(),
                before.into_buffer_arg(),
                out.keys.clone().into_buffer_arg(),
                out.ends.clone().into_buffer_arg(),
                rows as u32,
                n as u32,
            );
        }
    }
    out
}

pub(super) fn tile_key_lists(
    client: &Client,
    problem: &Problem,
    live: &LiveKeys,
    tiles: &QueryTiles,
    slice: Range<usize>,
) -> TileKeyLists {
    let (rows, n) = (problem.batch * problem.kv_heads, problem.k_len);
    let lists = TileKeyLists {
        keys: scratch(client, [rows, slice.len(), tiles.capacity]),
        counts: scratch(client, [rows, slice.len(), 2]),
        slice: slice.clone(),
    };
    if rows * slice.len() == 0 {
        return lists;
    }
    // Without causal masking one list serves all queries: that of a single query at the last key.
    let (tile_size, q_len, offset) = if problem.causal {
        (tiles.size, problem.q_len, problem.position(0))
    } else {
        (1, 1, problem.k_len as i64 - 1)
    };
    let (first_tile, tile_count) = (slice.start as u32, slice.len() as u32);
    let chunks = n.div_ceil(tile_keys::CHUNK as usize);
    let before = scratch(client, [rows, chunks, slice.len(), 2]);
    let address = address_type([&live.keys, &lists.keys, &before]);
    let pairs = rows * chunks * slice.len();
    if pairs > 0 {
        let (count, dim) = one_unit_each(client, pairs);
        // SAFETY: units past the pairs return; live counts are at most `n`.
        unsafe {
            count_tile_keys_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                live.keys.clone().into_buffer_arg(),
                live.ends.clone().into_buffer_arg(),
                live.counts.clone().into_buffer_arg(),
                before.clone().into_buffer_arg(),
                rows as u32,
                n as u32,
                first_tile,
                tile_count,
                tile_size as u32,
                q_len as u32,
                offset as i32,
            );
        }
    }
    let (count, dim) = one_unit_each(client, rows * slice.len());
    // SAFETY: units past the lists return; only chunks that hold live keys are read.
    unsafe {
        scan_tile_keys_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            live.counts.clone().into_buffer_arg(),
            before.clone().into_buffer_arg(),
            lists.counts.clone().into_buffer_arg(),
            rows as u32,
            n as u32,
            tile_count,
            tiles.capacity as u32,
        );
    }
    if pairs > 0 {
        let (count, dim) = one_unit_each(client, pairs);
        // SAFETY: units past the pairs return; the kernel writes only below `capacity`.
        unsafe {
            write_tile_keys_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                live.keys.clone().into_buffer_arg(),
                live.ends.clone().into_buffer_arg(),
                live.counts.clone().into_buffer_arg(),
                before.into_buffer_arg(),
                lists.counts.clone().into_buffer_arg(),
                lists.keys.clone().into_buffer_arg(),
                rows as u32,
                n as u32,
                first_tile,
                tile_count,
                tile_size as u32,
                q_len as u32,
                offset as i32,
                tiles.capacity as u32,
            );
        }
    }
    lists
}

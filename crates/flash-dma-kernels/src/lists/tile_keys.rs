//! Kernels that list the keys of every query tile from the live keys.
//!
//! The live keys of a row are cut into chunks and every (tile, chunk) pair is walked by one unit,
//! twice: to count and, once the counts before it are known, to write. Neighbouring units walk the
//! same chunk for neighbouring tiles, so their reads coincide.

use cubecl::prelude::*;

/// Live keys that one unit walks.
pub(super) const CHUNK: u32 = 128;

/// The positions of one query tile's first and last query; negative where a query sees no key.
#[derive(CubeType, Clone, Copy)]
struct Positions {
    first: i32,
    last: i32,
}

/// `offset` is the position of query 0.
#[cube]
fn positions(tile: u32, tile_size: u32, q_len: u32, offset: i32) -> Positions {
    let start = tile * tile_size;
    let end = min(start + tile_size, q_len);
    Positions {
        first: start as i32 + offset,
        last: (end - 1u32) as i32 + offset,
    }
}

/// Whether a query of the tile attends to the live key: its interval meets the positions.
#[cube]
fn is_listed(key: u32, end: u32, at: &Positions) -> bool {
    key as i32 <= at.last && end as i32 > at.first
}

/// Whether every query of the tile attends to the key.
#[cube]
fn is_full(key: u32, end: u32, at: &Positions) -> bool {
    key as i32 <= at.first && end as i32 > at.last
}

/// Counts the full and the boundary keys of each tile in each chunk of live keys.
///
/// One unit a (row, chunk, tile), the tile fastest; chunks behind the last live key are left alone.
/// `keys` and `ends` are `[rows, n]`, `live` `[rows]`. Overwrites `counts` `[rows, chunks, tiles, 2]`.
/// The tiles are those from `first_tile` on.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn count_tile_keys_kernel(
    keys: &[u32],
    ends: &[u32],
    live: &[u32],
    counts: &mut [u32],
    rows: u32,
    n: u32,
    first_tile: u32,
    tiles: u32,
    tile_size: u32,
    q_len: u32,
    offset: i32,
) {
    let chunks = n.div_ceil(CHUNK);
    let row_chunk = ABSOLUTE_POS / tiles as usize;
    let row = row_chunk / chunks as usize;
    if row < rows as usize {
        let tile = first_tile + (ABSOLUTE_POS % tiles as usize) as u32;
        let at = positions(tile, tile_size, q_len, offset);
        let start = (row_chunk % chunks as usize) as u32 * CHUNK;
        let end = min(start + CHUNK, live[row]);
        if start < end {
            let base = row * n as usize;
            let mut full = 0u32;
            let mut boundary = 0u32;
            // Keys ascend: a chunk that begins behind the tile holds none of its keys.
            if keys[base + start as usize] as i32 <= at.last {
                for i in start..end {
                    let key = keys[base + i as usize];
                    let key_end = ends[base + i as usize];
                    if is_full(key, key_end, &at) {
                        full += 1u32;
                    } else if is_listed(key, key_end, &at) {
                        boundary += 1u32;
                    }
                }
            }
            counts[ABSOLUTE_POS * 2] = full;
            counts[ABSOLUTE_POS * 2 + 1] = boundary;
        }
    }
}

/// Turns the counts of chunks into those before the chunk, in place, and overwrites `totals`
/// `[rows, tiles, 2]` with the number of full keys and of all keys, neither above `capacity`.
///
/// One unit a (row, tile). `counts` is `[rows, chunks, tiles, 2]`, `live` `[rows]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn scan_tile_keys_kernel(
    live: &[u32],
    counts: &mut [u32],
    totals: &mut [u32],
    rows: u32,
    n: u32,
    tiles: u32,
    capacity: u32,
) {
    let row = ABSOLUTE_POS / tiles as usize;
    if row < rows as usize {
        let tile = ABSOLUTE_POS % tiles as usize;
        let row_chunks = row * n.div_ceil(CHUNK) as usize;
        let mut full = 0u32;
        let mut boundary = 0u32;
        for chunk in 0..live[row].div_ceil(CHUNK) {
            let slot = ((row_chunks + chunk as usize) * tiles as usize + tile) * 2;
            let full_here = counts[slot];
            let boundary_here = counts[slot + 1];
            counts[slot] = full;
            counts[slot + 1] = boundary;
            full += full_here;
            boundary += boundary_here;
        }
        totals[ABSOLUTE_POS * 2] = min(full, capacity);
        totals[ABSOLUTE_POS * 2 + 1] = min(full + boundary, capacity);
    }
}

/// Writes the lists: the full keys, then the boundary keys, each ascending, never past `capacity`.
///
/// One unit a (row, chunk, tile) as in [`count_tile_keys_kernel`]. `before` `[rows, chunks, tiles, 2]`
/// are the keys before each chunk, `totals` `[rows, tiles, 2]` as scanned; `lists`
/// `[rows, tiles, capacity]` is overwritten up to the totals.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn write_tile_keys_kernel(
    keys: &[u32],
    ends: &[u32],
    live: &[u32],
    before: &[u32],
    totals: &[u32],
    lists: &mut [u32],
    rows: u32,
    n: u32,
    first_tile: u32,
    tiles: u32,
    tile_size: u32,
    q_len: u32,
    offset: i32,
    capacity: u32,
) {
    let chunks = n.div_ceil(CHUNK);
    let row_chunk = ABSOLUTE_POS / tiles as usize;
    let row = row_chunk / chunks as usize;
    if row < rows as usize {
        let local = ABSOLUTE_POS % tiles as usize;
        let at = positions(first_tile + local as u32, tile_size, q_len, offset);
        let start = (row_chunk % chunks as usize) as u32 * CHUNK;
        let end = min(start + CHUNK, live[row]);
        let base = row * n as usize;
        let list = (row * tiles as usize + local) * capacity as usize;
        if start < end && keys[base + start as usize] as i32 <= at.last {
            let mut full = before[ABSOLUTE_POS * 2];
            let mut boundary =
                totals[(row * tiles as usize + local) * 2] + before[ABSOLUTE_POS * 2 + 1];
            for i in start..end {
                let key = keys[base + i as usize];
                let key_end = ends[base + i as usize];
                if is_full(key, key_end, &at) {
                    if full < capacity {
                        lists[list + full as usize] = key;
                    }
                    full += 1u32;
                } else if is_listed(key, key_end, &at) {
                    if boundary < capacity {
                        lists[list + boundary as usize] = key;
                    }
                    boundary += 1u32;
                }
            }
        }
    }
}

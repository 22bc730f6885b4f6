//! The kernel that lists the keys of every query tile from the live keys.

use crate::pattern::intervals::live::{LiveFrom, LiveLists};
use crate::team::{Member, Team, ballot};
use cubecl::prelude::*;

/// Entries that a lane reads before it uses the first of them, so that the reads overlap.
const READS: usize = 8;
/// Waiting entries that a lane checks per round.
const PICKS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileKeysBlueprint {
    /// A plane for every tile of a cube.
    pub team: Team,
    /// Boundary keys of a tile that wait in shared memory: as many as births and deaths of a plain selection, which has
    /// at most one of each per position. Where more die at once, as at the end of a document, the others spill.
    pub boundary: usize,
}

impl TileKeysBlueprint {
    pub(crate) fn new(team: Team, tile_size: usize) -> Self {
        Self {
            team,
            boundary: (2 * tile_size).next_power_of_two().max(64),
        }
    }

    /// Entries of the live list that wait in shared memory; a multiple of [`step`](Self::step).
    fn waiting(&self) -> usize {
        2 * self.step()
    }

    /// Entries that a cube reads between two barriers.
    pub(crate) fn step(&self) -> usize {
        READS * self.team.lanes * self.team.planes
    }
}

/// The positions of the first and last query of a query tile or of a group of tiles; negative where one sees no key.
#[derive(CubeType, Clone, Copy)]
struct Positions {
    first: i32,
    last: i32,
}

#[cube]
impl Positions {
    /// The positions of the tiles `tile..=last_tile`; `offset` is the position of query 0.
    fn new(tile: u32, last_tile: u32, tile_size: u32, q_len: u32, offset: i32) -> Positions {
        let end = min((last_tile + 1u32) * tile_size, q_len);
        Positions {
            first: (tile * tile_size) as i32 + offset,
            last: (end - 1u32) as i32 + offset,
        }
    }

    /// True if a query attends to the key: its interval meets the positions.
    fn meets(&self, key: u32, end: u32) -> bool {
        key as i32 <= self.last && end as i32 > self.first
    }

    /// True if every query attends to the key.
    fn is_within(&self, key: u32, end: u32) -> bool {
        key as i32 <= self.first && end as i32 > self.last
    }
}

/// Sizes of a launch of [`tile_keys_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TileListSizes {
    pub rows: u32,
    pub n: u32,
    pub first_tile: u32,
    pub tiles: u32,
    pub tile_size: u32,
    pub q_len: u32,
    pub offset: i32,
    pub capacity: u32,
}

/// Writes the lists: the full keys, then the boundary keys, each ascending, never past `capacity`.
///
/// A cube owns a group of `planes` consecutive tiles of a row, one per plane. It reads once the live keys that may be
/// alive at the group's first position or are born up to its last; the entries that any of the group's positions attends
/// to wait in shared memory, where each plane picks the entries of its tile. Full keys go straight to the list, boundary
/// keys wait until the number of full keys is known: `bp.boundary` of them in shared memory, and the spilled ones at the
/// end of the list, the first of them in its last place.
///
/// | buffer | layout |
/// |---|---|
/// | `live` | see [`LiveKeys`](crate::pattern::intervals::LiveKeys) |
/// | `lists` | `[rows, tiles, capacity]`, overwritten up to the total |
/// | `counts` | `[rows, tiles, 2]`, overwritten: full keys, all keys |
///
/// The tiles are those from `first_tile` on.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn tile_keys_kernel(
    live: &LiveLists,
    lists: &mut [u32],
    counts: &mut [u32],
    sizes: &TileListSizes,
    #[comptime] bp: TileKeysBlueprint,
) {
    let team = comptime!(bp.team);
    let planes = comptime!(team.planes as u32);
    let groups = sizes.tiles.div_ceil(planes);
    let row = CUBE_POS / groups as usize;
    if row < sizes.rows as usize {
        let member = Member::this(team);
        // The last tiles see the most keys, so they go first.
        let group = groups - 1u32 - (CUBE_POS % groups as usize) as u32;
        let local = group * planes + member.plane as u32;
        let group_end = min(group * planes + planes, sizes.tiles);
        let tile = sizes.first_tile + min(local, sizes.tiles - 1u32);
        let at = Positions::new(tile, tile, sizes.tile_size, sizes.q_len, sizes.offset);
        let group_at = Positions::new(
            sizes.first_tile + group * planes,
            sizes.first_tile + group_end - 1u32,
            sizes.tile_size,
            sizes.q_len,
            sizes.offset,
        );

        let waiting = comptime!(bp.waiting());
        let mut waiting = Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(waiting, 128usize);
        let mut boundary_keys = Shared::<[u32]>::new_slice(comptime!(bp.boundary * team.planes));
        // Double-buffered: a plane may be one step ahead of a plane that still reads.
        let mut stepped = Shared::<[u32]>::new_slice(comptime!(2 * team.planes));

        let list = (row * sizes.tiles as usize + local as usize) * sizes.capacity as usize;
        let boundary_base = member.plane * comptime!(bp.boundary);
        let mut full = 0u32;
        let mut boundary = 0u32;
        let mut filled = 0u32;
        let mut parity = 0usize;
        let mut next = 0u32;
        let from = LiveFrom::new(live, row, sizes.n, group_at.first);
        let mut more = from.count > 0u32;
        if more {
            more = live.entries[from.place(0u32)].extract(0usize) as i32 <= group_at.last;
        }
        while more {
            let own = next + comptime!((READS * team.lanes) as u32) * member.plane as u32;
            let mut entries = Array::<Vector<u32, Const<2>>>::new(READS);
            let mut meets = Array::<bool>::new(READS);
            let mut bits = Array::<u32>::new(READS);
            let mut own_count = 0u32;
            #[unroll]
            for r in 0..READS {
                let i = own + comptime!((r * team.lanes) as u32) + member.lane as u32;
                let mut entry = live.entries[from.place(min(i, from.count - 1u32))];
                // Past the end of the list: an interval that ended before the first position.
                if i >= from.count {
                    entry.insert(1usize, 0u32);
                }
                entries[r] = entry;
            }
            #[unroll]
            for r in 0..READS {
                let (key, end) = (entries[r].extract(0usize), entries[r].extract(1usize));
                meets[r] = end > key && group_at.meets(key, end);
                bits[r] = ballot(meets[r], team);
                own_count += bits[r].count_ones();
            }
            if member.lane == 0 {
                stepped[parity * team.planes + member.plane] = own_count;
            }
            sync_cube();
            let mut place = filled;
            #[unroll]
            for plane in 0..team.planes {
                let other = stepped[parity * team.planes + plane];
                filled += other;
                place += select(plane < member.plane, other, 0u32);
            }
            #[unroll]
            for r in 0..READS {
                if meets[r] {
                    waiting[(place + (bits[r] & member.before).count_ones()) as usize] = entries[r];
                }
                place += bits[r].count_ones();
            }
            parity = 1usize - parity;
            next += comptime!(bp.step() as u32);
            more = next < from.count;
            if more {
                more = live.entries[from.place(next)].extract(0usize) as i32 <= group_at.last;
            }

            if !more || filled > comptime!((bp.waiting() - bp.step()) as u32) {
                sync_cube();
                if local < sizes.tiles {
                    let mut turn = 0u32;
                    while turn < filled {
                        let mut picked = Array::<Vector<u32, Const<2>>>::new(PICKS);
                        #[unroll]
                        for p in 0..PICKS {
                            let i = turn + comptime!((p * team.lanes) as u32) + member.lane as u32;
                            picked[p] = waiting[min(i, filled - 1u32) as usize];
                        }
                        #[unroll]
                        for p in 0..PICKS {
                            let i = turn + comptime!((p * team.lanes) as u32) + member.lane as u32;
                            let (key, end) = (picked[p].extract(0usize), picked[p].extract(1usize));
                            let is_here = i < filled && at.meets(key, end);
                            let is_full = is_here && at.is_within(key, end);
                            let is_boundary = is_here && !is_full;
                            let full_bits = ballot(is_full, team);
                            let boundary_bits = ballot(is_boundary, team);
                            let place = full + (full_bits & member.before).count_ones();
                            if is_full && place < sizes.capacity {
                                lists[list + place as usize] = key;
                            }
                            full += full_bits.count_ones();
                            let place = boundary + (boundary_bits & member.before).count_ones();
                            if is_boundary && place < comptime!(bp.boundary as u32) {
                                boundary_keys[boundary_base + place as usize] = key;
                            } else if is_boundary {
                                // The last place of the list is that of the first spilled key.
                                let spilled = place - comptime!(bp.boundary as u32 - 1);
                                let behind = min(spilled, sizes.capacity);
                                lists[list + (sizes.capacity - behind) as usize] = key;
                            }
                            boundary += boundary_bits.count_ones();
                        }
                        turn += comptime!((PICKS * team.lanes) as u32);
                    }
                }
                filled = 0u32;
                sync_cube();
            }
        }

        // A spilled key is moved by another lane than the one that wrote it.
        if comptime!(team.lanes > 1) {
            sync_storage();
        }
        if local < sizes.tiles {
            full = min(full, sizes.capacity);
            boundary = min(boundary, sizes.capacity - full);
            let total = full + boundary;
            let waited = min(boundary, comptime!(bp.boundary as u32));
            let mut i = member.lane as u32;
            while i < waited {
                lists[list + (full + i) as usize] = boundary_keys[boundary_base + i as usize];
                i += comptime!(team.lanes as u32);
            }
            let start = list + (full + waited) as usize;
            let places = sizes.capacity - full - waited;
            unspill(lists, start, places, boundary - waited, &member, team);
            if member.lane == 0 {
                let to = (row * sizes.tiles as usize + local as usize) * 2;
                counts[to] = full;
                counts[to + 1] = total;
            }
        }
    }
}

/// Moves `spilled` keys, which are in reverse order at the end of the `places` places from `start` on, to the beginning
/// and into order: the places are reversed. A lane swaps pairs of places, so no lane reads what another one writes.
#[cube]
fn unspill(
    lists: &mut [u32],
    start: usize,
    places: u32,
    spilled: u32,
    member: &Member,
    #[comptime] team: Team,
) {
    let mut near = member.lane as u32;
    while near < spilled {
        let far = places - 1u32 - near;
        if near <= far {
            let (to, from) = (start + near as usize, start + far as usize);
            let (moved, displaced) = (lists[from], lists[to]);
            lists[to] = moved;
            // The first places hold another spilled key, or nothing.
            if far < spilled {
                lists[from] = displaced;
            }
        }
        near += comptime!(team.lanes as u32);
    }
}

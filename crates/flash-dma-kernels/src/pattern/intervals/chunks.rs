//! The keys of each chunk of queries, in an order that makes neighbours live together.
//!
//! A key tile streams the queries from the first birth to the last death among its keys, clipped to the chunk. The
//! order is: the keys that die in the chunk, earliest death first; the keys that live through it; the keys born in it
//! that outlive it, earliest birth first; last the brief ones, which are born and die in it within an eighth of it,
//! latest birth first. Nearly all recent keys are brief, and one that stays would make its tile stream all queries that
//! are left. A key that is born and dies in the chunk without being brief counts as alive from the chunk's beginning or
//! to its end, whichever is nearer. Any cut of this order into tiles then wastes little.

use crate::host::scratch::{address_type, bytes, scratch};
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::classes::{
    ALL_CLASSES, BRIEF_CLASSES, CLASSES, ChunkQueries, QueryChunks, QueryChunksLaunch, class_bits,
};
use crate::pattern::intervals::live::{LiveFrom, LiveLists};
use crate::pattern::intervals::ranked::RankedKeys;
use crate::pattern::intervals::tiles::most_alive;
use crate::team::{Member, Team, first_value};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

#[cfg(test)]
mod tests;

/// Planes of a cube that lists a chunk's keys.
const PLANES: usize = 32;
/// Entries that a lane reads before it uses the first of them, so that the reads overlap.
const READS: usize = 4;
/// Words per chunk in [`ChunkKeys::starts`].
pub(crate) const STARTS: usize = ALL_CLASSES + 1;

/// The keys that some query of a chunk attends to, or whose ranks it trains.
#[derive(Clone, Debug)]
pub(crate) struct ChunkKeys {
    /// Contiguous `[batch * kv_heads, chunks, capacity]`, u32; undefined past the count.
    pub keys: TensorBinding,
    /// Contiguous `[batch * kv_heads, chunks]`, u32, at most `capacity`.
    pub counts: TensorBinding,
    /// Contiguous `[batch * kv_heads, chunks, STARTS]`, u32: where each class of keys begins in its chunk's list, and
    /// last the count. Within a class the keys ascend, from [`BRIEF_CLASSES`] on they descend. A single chunk has none.
    pub starts: Option<TensorBinding>,
    pub capacity: usize,
}

impl ChunkKeys {
    /// The shapes of `keys`, `counts` and `starts` if at most `max_live` keys are alive at one position.
    fn shapes(
        problem: &Problem,
        max_live: usize,
        chunk: usize,
    ) -> ([usize; 3], [usize; 2], [usize; 3]) {
        let rows = problem.batch * problem.kv_heads;
        let chunks = problem.q_len.div_ceil(chunk);
        let keys = [rows, chunks, most_alive(problem, max_live, chunk)];
        (keys, [rows, chunks], [rows, chunks, STARTS])
    }

    /// The bytes of the buffers that [`chunk_keys`] allocates for such keys.
    pub(crate) fn bytes(problem: &Problem, max_live: usize, chunk: usize) -> usize {
        let (keys, counts, starts) = Self::shapes(problem, max_live, chunk);
        bytes(keys) + bytes(counts) + bytes(starts)
    }
}

/// The lists from which the keys of the chunks are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Listed {
    Live,
    Ranked,
}

/// The keys that are listed, of [`Listed::Live`] or [`Listed::Ranked`].
#[derive(CubeType, CubeLaunch)]
struct KeyList {
    live: ComptimeOption<LiveLists>,
    ranked: ComptimeOption<RankedLists>,
}

/// The lists of [`RankedKeys`] as kernel arguments.
#[derive(CubeType, CubeLaunch)]
struct RankedLists {
    keys: Box<[u32]>,
    /// First and one past the last position of each entry of `keys`.
    spans: Box<[Vector<u32, Const<2>>]>,
    counts: Box<[u32]>,
}

/// The entries that a chunk may list.
#[derive(CubeType, Clone, Copy)]
struct ChunkEntries {
    count: usize,
    /// [`Listed::Live`] only.
    live: LiveFrom,
    /// [`Listed::Ranked`] only: the first entry.
    base: usize,
}

/// [`READS`] entries of a lane. Those past the end of its plane's share are on no position.
#[derive(CubeType)]
struct ListedKeys {
    keys: Array<u32>,
    /// First and one past the last position of each.
    firsts: Array<u32>,
    ends: Array<u32>,
}

#[cube]
impl KeyList {
    /// The entries of row `row` that the queries of a chunk may see.
    fn entries(
        &self,
        row: usize,
        queries: &ChunkQueries,
        #[comptime] source: Listed,
        #[comptime] causal: bool,
    ) -> ChunkEntries {
        let k_len = queries.k_len;
        let base = row * k_len as usize;
        if comptime!(source == Listed::Live) {
            let mut position = k_len as i32 - 1;
            let mut end = k_len;
            if comptime!(causal) {
                position = queries.first - queries.shift;
                end = max(queries.end - queries.shift, 0i32) as u32;
            }
            let live = LiveFrom::new(self.live.as_ref().unwrap(), row, k_len, position);
            ChunkEntries {
                count: live.until(end) as usize,
                live,
                base,
            }
        } else {
            ChunkEntries {
                count: self.ranked.as_ref().unwrap().counts[row] as usize,
                live: LiveFrom::none(),
                base,
            }
        }
    }

    /// Reads this lane's entries among the `READS * lanes` from `at` on, before `end`.
    fn read(
        &self,
        entries: &ChunkEntries,
        at: usize,
        end: usize,
        member: &Member,
        #[comptime] source: Listed,
        #[comptime] team: Team,
    ) -> ListedKeys {
        let mut read = ListedKeys {
            keys: Array::<u32>::new(READS),
            firsts: Array::<u32>::new(READS),
            ends: Array::<u32>::new(READS),
        };
        #[unroll]
        for r in 0..READS {
            let own = at + comptime!(r * team.lanes) + member.lane;
            let entry = min(own, end - 1);
            if comptime!(source == Listed::Live) {
                let live = self.live.as_ref().unwrap();
                let interval = live.entries[entries.live.place(entry as u32)];
                read.keys[r] = interval.extract(0usize);
                read.firsts[r] = read.keys[r];
                read.ends[r] = interval.extract(1usize);
            } else {
                let ranked = self.ranked.as_ref().unwrap();
                let from = entries.base + entry;
                read.keys[r] = ranked.keys[from];
                let span = ranked.spans[from];
                read.firsts[r] = span.extract(0usize);
                read.ends[r] = span.extract(1usize);
            }
            read.ends[r] = select(own < end, read.ends[r], 0u32);
        }
        read
    }
}

/// The configuration of [`chunk_keys_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ChunksBlueprint {
    source: Listed,
    causal: bool,
    team: Team,
}

/// A stable counting sort by class of a chunk's keys: a cube per chunk (x) and row (y), a share of the row per plane.
///
/// | buffer | layout |
/// |---|---|
/// | `all` | [`KeyList`] |
/// | `list`, `counts`, `starts` | see [`ChunkKeys`], overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn chunk_keys_kernel(
    all: &KeyList,
    list: &mut [u32],
    counts: &mut [u32],
    starts: &mut [u32],
    sizes: &QueryChunks,
    capacity: u32,
    #[comptime] bp: ChunksBlueprint,
) {
    let (source, causal, team) = comptime!((bp.source, bp.causal, bp.team));
    let row = CUBE_POS_Y as usize;
    let (unit, units) = (UNIT_POS as usize, comptime!(team.units()));
    let member = Member::this(team);
    let queries = ChunkQueries::of_chunk(CUBE_POS_X, sizes.chunk, sizes.q_len, sizes.k_len);
    let bits = class_bits(sizes.chunk);
    let entries = all.entries(row, &queries, source, causal);
    let turn = comptime!(READS * team.lanes);
    let share = entries.count.div_ceil(team.planes).div_ceil(turn) * turn;
    let start = min(member.plane * share, entries.count);
    let end = min(start + share, entries.count);

    // For each class and plane: the number of keys, then the place of the next. Planes that sum use different banks.
    let class_words = comptime!(team.planes + 1);
    let counters = Shared::<[Atomic<u32>]>::new_slice(comptime!(ALL_CLASSES * class_words));
    let mut totals = Shared::<[u32]>::new_slice(ALL_CLASSES);
    // For each class of brief keys: the sum of a place and its mirror image in the class.
    let mut mirrors = Shared::<[u32]>::new_slice(CLASSES);
    let mut counter = unit;
    while counter < comptime!(ALL_CLASSES * class_words) {
        counters[counter].store(0u32);
        counter += units;
    }
    sync_cube();
    let mut at = start;
    while at < end {
        let read = all.read(&entries, at, end, &member, source, team);
        #[unroll]
        for r in 0..READS {
            let key = queries.classed(read.firsts[r], read.ends[r], bits, causal, team);
            if key.leads(&member) {
                let counter = key.class * class_words + member.plane;
                counters[counter].fetch_add(key.same.count_ones());
            }
        }
        at += turn;
    }
    sync_cube();
    let mut class = unit;
    while class < ALL_CLASSES {
        let mut total = 0u32;
        for plane in 0..team.planes {
            total += counters[class * class_words + plane].load();
        }
        totals[class] = total;
        class += units;
    }
    sync_cube();
    let mut class = unit;
    while class < ALL_CLASSES {
        let mut next = 0u32;
        for before in 0..class {
            next += totals[before];
        }
        let item = row * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
        starts[item * STARTS + class] = min(next, capacity);
        if class >= BRIEF_CLASSES {
            // Read only where there are keys.
            mirrors[class - BRIEF_CLASSES] = 2 * next + totals[class] - 1u32;
        }
        for plane in 0..team.planes {
            let here = counters[class * class_words + plane].load();
            counters[class * class_words + plane].store(next);
            next += here;
        }
        if class == comptime!(ALL_CLASSES - 1) {
            counts[item] = min(next, capacity);
            starts[item * STARTS + class + 1] = min(next, capacity);
        }
        class += units;
    }
    sync_cube();
    let to = (row * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * capacity as usize;
    let mut at = start;
    while at < end {
        let read = all.read(&entries, at, end, &member, source, team);
        #[unroll]
        for r in 0..READS {
            let key = queries.classed(read.firsts[r], read.ends[r], bits, causal, team);
            let mut place = 0u32;
            if key.leads(&member) {
                let counter = key.class * class_words + member.plane;
                place = counters[counter].fetch_add(key.same.count_ones());
            }
            // The first lane of a class has its place; every lane must take part.
            place = first_value(place, key.same, team) + (key.same & member.before).count_ones();
            if key.is_listed && key.class >= BRIEF_CLASSES {
                place = mirrors[key.class - BRIEF_CLASSES] - place;
            }
            if key.is_listed && place < capacity {
                list[to + place as usize] = read.keys[r];
            }
        }
        at += turn;
    }
}

/// A list of keys, with the most keys of a row that are alive at one position.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// The keys that are attended to, by the window.
    Live(&'a LiveKeys),
    /// The keys whose ranks learn, and the most of them at one position.
    Ranked(&'a RankedKeys, usize),
}

/// Lists the keys of every chunk of `chunk` queries in one launch, whose grid must have a cube for each chunk and row.
pub(crate) fn chunk_keys(
    client: &Client,
    problem: &Problem,
    keys: Keys,
    chunk: usize,
) -> ChunkKeys {
    chunk_keys_with(client, problem, keys, chunk, Team::new(client, PLANES))
}

fn chunk_keys_with(
    client: &Client,
    problem: &Problem,
    keys: Keys,
    chunk: usize,
    team: Team,
) -> ChunkKeys {
    let (listed, max_live, all, largest) = match keys {
        Keys::Live(live) => {
            let all = KeyListLaunch::new(Some(live.lists()).into(), None.into());
            (Listed::Live, problem.window, all, &live.entries)
        }
        Keys::Ranked(ranked, max_live) => {
            let [keys, spans, counts] = [&ranked.keys, &ranked.listed, &ranked.counts]
                .map(|binding| binding.clone().into_buffer_arg());
            let lists = RankedListsLaunch::new(keys, spans, counts);
            let all = KeyListLaunch::new(None.into(), Some(lists).into());
            (Listed::Ranked, max_live, all, &ranked.listed)
        }
    };
    let (lists, counts, starts) = ChunkKeys::shapes(problem, max_live, chunk);
    let [rows, chunks, capacity] = lists;
    let starts = scratch(client, starts);
    let out = ChunkKeys {
        keys: scratch(client, lists),
        counts: scratch(client, counts),
        starts: Some(starts.clone()),
        capacity,
    };
    let address = address_type([largest, &out.keys]);
    // SAFETY: a row's list has at most `k_len` entries; the kernel writes only below `capacity`.
    unsafe {
        chunk_keys_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, rows as u32, 1),
            team.cube_dim(),
            address,
            all,
            out.keys.clone().into_buffer_arg(),
            out.counts.clone().into_buffer_arg(),
            starts.into_buffer_arg(),
            QueryChunksLaunch::new(problem.q_len as u32, problem.k_len as u32, chunk as u32),
            capacity as u32,
            ChunksBlueprint {
                source: listed,
                causal: problem.causal,
                team,
            },
        );
    }
    out
}

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
use crate::pattern::intervals::live::{LiveFrom, LiveLists};
use crate::pattern::intervals::ranked::RankedKeys;
use crate::pattern::intervals::tiles::most_alive;
use crate::pattern::position::query_shift;
use crate::team::{Member, Team, ballot, first_value, same_lanes};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Classes of deaths, and of births, in a chunk.
const CLASSES: usize = 32;
/// The first class of brief keys. In it and the classes after it keys descend.
pub(crate) const BRIEF_CLASSES: usize = 2 * CLASSES + 1;
/// The classes of a chunk's keys: deaths, the whole chunk, births, and, from last to first, births of brief keys.
const ALL_CLASSES: usize = BRIEF_CLASSES + CLASSES;
/// Bits of a class and of [`ALL_CLASSES`].
const CLASS_BITS: u32 = ALL_CLASSES.ilog2() + 1;
/// The most class widths that a brief key lives. Wider tiles of brief keys would stream much that most of them do not
/// see; a lower limit would leave recent keys among those that stay.
const BRIEF: i32 = 4;
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

#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkQueries {
    first: i32,
    end: i32,
    /// Maps a position to its query.
    shift: i32,
    k_len: u32,
}

/// The queries `from .. to` of a chunk that see a key; none if `from >= to`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Seen {
    pub from: i32,
    pub to: i32,
}

/// The cut of queries into chunks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct QueryChunks {
    pub q_len: u32,
    pub k_len: u32,
    pub chunk: u32,
}

#[cube]
impl QueryChunks {
    /// True if the queries that see the key of an interval are in more than one chunk.
    pub(crate) fn share(&self, interval: Vector<u32, Const<2>>, #[comptime] causal: bool) -> bool {
        let (first, end) = (interval.extract(0usize), interval.extract(1usize));
        let seen = ChunkQueries::all(self.q_len, self.k_len).seen(first, end, causal);
        let chunk = self.chunk as i32;
        seen.from >= seen.to || seen.from / chunk != (seen.to - 1i32) / chunk
    }
}

/// A key of a lane among those of its plane.
#[derive(CubeType, Clone, Copy)]
struct Classed {
    is_listed: bool,
    class: usize,
    /// If the key is listed, the lanes whose keys are listed in the same class, one bit each.
    same: u32,
}

#[cube]
impl Classed {
    /// True if the lane is the first of its class.
    fn leads(&self, member: &Member) -> bool {
        self.is_listed && self.same & member.before == 0u32
    }
}

#[cube]
impl ChunkQueries {
    pub(crate) fn of_chunk(chunk: u32, size: u32, q_len: u32, k_len: u32) -> ChunkQueries {
        ChunkQueries {
            first: (chunk * size) as i32,
            end: min(chunk * size + size, q_len) as i32,
            shift: query_shift(q_len as usize, k_len as usize),
            k_len,
        }
    }

    pub(crate) fn all(q_len: u32, k_len: u32) -> ChunkQueries {
        ChunkQueries::of_chunk(0u32, q_len, q_len, k_len)
    }

    /// Classifies the key of each of a plane's lanes, with positions `first .. end`. Every lane must take part.
    fn classed(
        &self,
        first: u32,
        end: u32,
        bits: u32,
        #[comptime] causal: bool,
        #[comptime] team: Team,
    ) -> Classed {
        let seen = self.seen(first, end, causal);
        let mut classed = Classed {
            is_listed: seen.from < seen.to,
            class: 0usize,
            same: 0u32,
        };
        let listed = ballot(classed.is_listed, team);
        // Most of the older keys are gone, often all of a plane's.
        if listed != 0u32 {
            classed.class = self.class_of(&seen, bits);
            classed.same = same_lanes(classed.class as u32, CLASS_BITS, team) & listed;
        }
        classed
    }

    pub(crate) fn seen(&self, first: u32, end: u32, #[comptime] causal: bool) -> Seen {
        let mut seen = Seen {
            from: self.first,
            to: self.end,
        };
        if comptime!(causal) {
            seen.from = max(self.first, first as i32 + self.shift);
            seen.to = min(self.end, end as i32 + self.shift);
        } else if end < self.k_len {
            // All queries have the position of the last key.
            seen.to = self.first;
        }
        seen
    }

    /// The class of a key that the queries `seen`, at least one, see; `bits` is [`class_bits`].
    pub(crate) fn class_of(&self, seen: &Seen, bits: u32) -> usize {
        let (born, dies) = (seen.from > self.first, seen.to < self.end);
        let birth = (seen.from - self.first) >> bits as i32;
        let death = (seen.to - 1 - self.first) >> bits as i32;
        let brief = dies && seen.to - seen.from <= comptime!(BRIEF) << bits as i32;
        let early = dies && seen.from - self.first < self.end - seen.to;
        let mut class = comptime!(CLASSES as i32).runtime();
        if born && brief {
            class = comptime!((BRIEF_CLASSES + CLASSES - 1) as i32) - birth;
        } else if born && !early {
            class = comptime!(CLASSES as i32 + 1) + birth;
        } else if dies {
            class = death;
        }
        class as usize
    }
}

/// `log2` of the queries per class of deaths or births: the least with which [`CLASSES`] cover a chunk.
#[cube]
pub(crate) fn class_bits(chunk: u32) -> u32 {
    let width = chunk.div_ceil(comptime!(CLASSES as u32));
    comptime!(u32::BITS) - (width - 1u32).leading_zeros()
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
    #[comptime] source: Listed,
    #[comptime] causal: bool,
    #[comptime] team: Team,
) {
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
            listed,
            problem.causal,
            team,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::intervals::live_keys;
    use crate::pattern::intervals::tests::{problem, rows_of};
    use crate::testing::{client, contiguous, read_u32, selection, zeros};
    use flash_dma_problem::Interval;
    use flash_dma_reference::Rng;
    use flash_dma_reference::compose::max_live;
    use flash_dma_reference::generate::Scores;

    /// The queries of a chunk that attend to a key.
    fn attended(p: &Problem, interval: &Interval, chunk: std::ops::Range<usize>) -> Vec<usize> {
        chunk
            .filter(|&query| interval.contains(p.position(query)))
            .collect()
    }

    /// Deaths, lives, births, births of brief keys; the times within a class differ by less than its width.
    fn class(
        p: &Problem,
        interval: &Interval,
        chunk: &std::ops::Range<usize>,
        width: usize,
    ) -> (usize, usize) {
        let seen = attended(p, interval, chunk.clone());
        let (first, last) = (seen[0], seen[seen.len() - 1]);
        match (first > chunk.start, last + 1 < chunk.end) {
            (true, true) if last < first + BRIEF as usize * width => {
                (3, CLASSES - 1 - (first - chunk.start) / width)
            }
            (true, true) if first - chunk.start < chunk.end - (last + 1) => {
                (0, (last - chunk.start) / width)
            }
            (true, _) => (2, (first - chunk.start) / width),
            (false, true) => (0, (last - chunk.start) / width),
            (false, false) => (1, 0),
        }
    }

    /// Compares the list of every chunk with its definition: the keys of `listed`, on `spans`, that it attends to.
    fn compare(p: &Problem, keys: Keys, spans: &[Vec<Interval>], listed: &[u32], chunk: usize) {
        let client = client();
        let chunks = p.q_len.div_ceil(chunk);
        let width = chunk.div_ceil(CLASSES).next_power_of_two();
        for planes in [1, 4] {
            let lists = chunk_keys_with(&client, p, keys, chunk, Team { lanes: 1, planes });
            let [keys, counts, starts] = [lists.keys, lists.counts, lists.starts.unwrap()]
                .map(|words| read_u32(&client, words));
            for (row, n) in (0..2).flat_map(|row| (0..chunks).map(move |n| (row, n))) {
                let queries = n * chunk..((n + 1) * chunk).min(p.q_len);
                let list = row * chunks + n;
                let found = &keys[list * lists.capacity..][..counts[list] as usize];
                let span = |key: u32| &spans[row][key as usize];
                let place = |key: u32| class(p, span(key), &queries, width);
                let mut expected = listed.to_vec();
                expected.retain(|&key| !attended(p, span(key), queries.clone()).is_empty());
                expected.sort_by_key(|&key| place(key));
                // Stable, but brief keys from last to first within their class.
                let brief = |a: &u32, b: &u32| place(*a).0 == 3 && place(*a) == place(*b);
                for class in expected.chunk_by_mut(brief) {
                    class.reverse();
                }
                assert_eq!(found, expected, "row {row}, chunk {n}, {planes} planes");
                let starts = &starts[list * STARTS..][..STARTS];
                assert_eq!((starts[0], starts[STARTS - 1]), (0, counts[list]));
                for class in starts.windows(2) {
                    let keys = &found[class[0] as usize..class[1] as usize];
                    assert!(keys.iter().all(|&key| place(key) == place(keys[0])));
                }
            }
        }
    }

    fn check(q_len: usize, k_len: usize, window: usize, causal: bool, chunk: usize) {
        let client = client();
        let p = problem(2, q_len, k_len, window, causal);
        let rows = rows_of([Scores::Normal; 2], k_len, p.window, 3);
        let live = live_keys(&client, &p, &selection(&client, &rows));
        let all: Vec<u32> = (0..k_len as u32).collect();
        compare(&p, Keys::Live(&live), &rows, &all, chunk);
    }

    /// Two rows of keys in any order, on spans that begin anywhere.
    fn check_ranked(q_len: usize, k_len: usize, chunk: usize) {
        let client = client();
        let p = problem(2, q_len, k_len, 3, true);
        let mut rng = Rng::new(4);
        let mut span = |key: usize| {
            let first = key + rng.below(k_len - key);
            let end = first + 1 + rng.below((k_len - first).min(40));
            let [first, end] = [first, end].map(|position| position as u32);
            Interval { first, end }
        };
        let spans = [(); 2].map(|()| (0..k_len).map(&mut span).collect::<Vec<Interval>>());
        // Every third key is none, and the list descends.
        let listed: Vec<u32> = (0..k_len as u32).rev().filter(|key| key % 3 != 0).collect();
        let mut keys = vec![0; 2 * k_len];
        let mut positions = vec![0; 4 * k_len];
        for (row, spans) in spans.iter().enumerate() {
            for (n, &key) in listed.iter().enumerate() {
                keys[row * k_len + n] = key;
                let span = &spans[key as usize];
                positions[2 * (row * k_len + n)..][..2].copy_from_slice(&[span.first, span.end]);
            }
        }
        let ranked = RankedKeys {
            keys: contiguous(&client, &keys, &[2, k_len]),
            spans: zeros(&client, &[1, 2, k_len, 2]),
            listed: contiguous(&client, &positions, &[1, 2, k_len, 2]),
            counts: contiguous(&client, &[listed.len() as u32; 2], &[2]),
        };
        let most = spans.iter().map(|row| {
            let until = row.iter().enumerate().map(|(key, span)| Interval {
                first: key as u32,
                end: span.end,
            });
            max_live(&until.collect::<Vec<_>>())
        });
        let most = Keys::Ranked(&ranked, most.max().unwrap());
        compare(&p, most, &spans, &listed, chunk);
    }

    #[test]
    fn every_chunk_lists_the_keys_whose_ranks_learn() {
        check_ranked(200, 200, 64);
        check_ranked(150, 200, 50);
        check_ranked(200, 150, 48);
    }

    #[test]
    fn every_chunk_lists_its_keys_by_death_and_birth() {
        check(200, 200, 20, true, 64);
        check(150, 200, 30, true, 50);
        check(200, 150, 30, true, 48);
        check(100, 150, 30, false, 48);
        check(70, 70, 70, true, 70);
    }

    #[test]
    fn a_late_chunk_lists_the_lasting_keys_before_it() {
        check(900, 900, 30, true, 128);
        check(400, 900, 30, true, 100);
        check(100, 900, 30, false, 48);
    }
}

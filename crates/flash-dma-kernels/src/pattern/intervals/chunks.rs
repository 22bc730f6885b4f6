//! The keys of each chunk of queries, in an order that makes neighbours live together.
//!
//! A key tile streams the queries from the first birth to the last death among its keys, clipped to the chunk. The
//! chunk's order puts first the keys that die in it, earliest death first; then the keys that live through it; then the
//! keys born in it that outlive it, earliest birth first; last those that die in it, too, in the same order: among recent
//! keys nearly all, and one that stays would make its tile stream all queries that are left. Any cut of this order into
//! tiles then wastes little.

use crate::host::scratch::{address_type, bytes, scratch};
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::runners::RunnersUp;
use crate::pattern::intervals::tiles::most_alive;
use crate::pattern::position::query_shift;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Classes of deaths, and of births, in a chunk.
const CLASSES: usize = 32;
/// The classes of a chunk's keys: deaths, the whole chunk, births, births of keys that die in it.
const ALL_CLASSES: usize = 3 * CLASSES + 1;
/// Words per chunk in [`ChunkKeys::starts`].
pub(crate) const STARTS: usize = ALL_CLASSES + 1;

/// The keys that some query of a chunk attends to, or has as runners-up.
#[derive(Clone, Debug)]
pub(crate) struct ChunkKeys {
    /// Contiguous `[batch * kv_heads, chunks, capacity]`, u32; undefined past the count.
    pub keys: TensorBinding,
    /// Contiguous `[batch * kv_heads, chunks]`, u32, at most `capacity`.
    pub counts: TensorBinding,
    /// Contiguous `[batch * kv_heads, chunks, STARTS]`, u32: where each class of keys begins in its chunk's list, and
    /// last the count. Within a class the keys ascend. A single chunk has none.
    pub starts: Option<TensorBinding>,
    /// The most keys of a chunk.
    pub capacity: usize,
}

impl ChunkKeys {
    /// The shapes of `keys`, `counts` and `starts` for chunks of `chunk` queries, of keys of which at most `max_live`
    /// are alive at one position.
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

/// What the keys of the chunks are listed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Listed {
    /// [`LiveKeys`].
    Live,
    /// [`RunnersUp`].
    RunnersUp,
}

/// A list of keys per row, and the positions of each entry.
#[derive(CubeType, CubeLaunch)]
struct KeyList {
    /// Contiguous `[rows, k_len]`, defined up to the row's count.
    keys: Box<[u32]>,
    /// Contiguous `[rows]`.
    counts: Box<[u32]>,
    /// [`Listed::Live`] only: as `keys`, one past the last position of each entry. The first one is the key.
    ends: ComptimeOption<Box<[u32]>>,
    /// [`Listed::RunnersUp`] only: as `keys`, the first and one past the last position of each entry.
    spans: ComptimeOption<Box<[Vector<u32, Const<2>>]>>,
}

/// An entry of a [`KeyList`].
#[derive(CubeType, Clone, Copy)]
struct ListedKey {
    key: u32,
    first: u32,
    end: u32,
}

#[cube]
impl KeyList {
    fn entry(&self, at: usize, #[comptime] listed: Listed) -> ListedKey {
        let key = self.keys[at];
        if comptime!(listed == Listed::Live) {
            ListedKey {
                key,
                first: key,
                end: self.ends.as_ref().unwrap()[at],
            }
        } else {
            let span = self.spans.as_ref().unwrap()[at];
            ListedKey {
                key,
                first: span.extract(0usize),
                end: span.extract(1usize),
            }
        }
    }
}

/// The class of the key with positions `first .. end` in the chunk of queries `chunk_first .. chunk_end`;
/// [`ALL_CLASSES`] if none of them has it. `shift` maps a position to its query.
#[cube]
pub(crate) fn class_of(
    first: u32,
    end: u32,
    chunk_first: i32,
    chunk_end: i32,
    width: i32,
    shift: i32,
    k_len: u32,
    #[comptime] causal: bool,
) -> usize {
    let mut from = chunk_first;
    let mut to = chunk_end;
    if comptime!(causal) {
        from = max(from, first as i32 + shift);
        to = min(to, end as i32 + shift);
    } else if end < k_len {
        // All queries have the position of the last key.
        to = from;
    }
    let mut class = ALL_CLASSES.runtime();
    if from < to {
        class = CLASSES.runtime();
        if from > chunk_first {
            class = select(to < chunk_end, 2 * CLASSES + 1, CLASSES + 1)
                + min((from - chunk_first) / width, comptime!(CLASSES as i32 - 1)) as usize;
        } else if to < chunk_end {
            class = min(
                (to - 1 - chunk_first) / width,
                comptime!(CLASSES as i32 - 1),
            ) as usize;
        }
    }
    class
}

/// Queries of a class of deaths or births.
#[cube]
pub(crate) fn class_width(chunk: u32) -> i32 {
    chunk.div_ceil(comptime!(CLASSES as u32)) as i32
}

/// Sizes of a launch of [`chunk_keys_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ChunkSizes {
    pub q_len: u32,
    pub k_len: u32,
    pub chunk: u32,
    pub capacity: u32,
}

/// A stable counting sort of the listed keys of a chunk by class: one cube per chunk (x) and row (y), one share of the
/// row's list per unit.
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
    sizes: &ChunkSizes,
    #[comptime] listed: Listed,
    #[comptime] causal: bool,
    #[comptime] units: usize,
) {
    let row = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let base = row * sizes.k_len as usize;
    let count = all.counts[row] as usize;
    let share = count.div_ceil(units);
    let start = min(unit * share, count);
    let end = min(start + share, count);
    let chunk_first = (CUBE_POS_X * sizes.chunk) as i32;
    let chunk_end = min(CUBE_POS_X * sizes.chunk + sizes.chunk, sizes.q_len) as i32;
    let width = class_width(sizes.chunk);
    let shift = query_shift(sizes.q_len as usize, sizes.k_len as usize);

    // For each class and unit: the number of keys, then the destination of its next key. The units that add up a class
    // each are in different banks.
    let class_words = comptime!(units + 1);
    let mut counters = Shared::<[u32]>::new_slice(comptime!(ALL_CLASSES * class_words));
    let mut totals = Shared::<[u32]>::new_slice(ALL_CLASSES);
    for class in 0..ALL_CLASSES {
        counters[class * class_words + unit] = 0u32;
    }
    for n in start..end {
        let entry = all.entry(base + n, listed);
        let class = class_of(
            entry.first,
            entry.end,
            chunk_first,
            chunk_end,
            width,
            shift,
            sizes.k_len,
            causal,
        );
        if class < ALL_CLASSES {
            counters[class * class_words + unit] += 1u32;
        }
    }
    sync_cube();
    let mut class = unit;
    while class < ALL_CLASSES {
        let mut total = 0u32;
        for other in 0..units {
            total += counters[class * class_words + other];
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
        starts[item * STARTS + class] = min(next, sizes.capacity);
        for other in 0..units {
            let here = counters[class * class_words + other];
            counters[class * class_words + other] = next;
            next += here;
        }
        if class == comptime!(ALL_CLASSES - 1) {
            counts[item] = min(next, sizes.capacity);
            starts[item * STARTS + class + 1] = min(next, sizes.capacity);
        }
        class += units;
    }
    sync_cube();
    let to = (row * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * sizes.capacity as usize;
    for n in start..end {
        let entry = all.entry(base + n, listed);
        let class = class_of(
            entry.first,
            entry.end,
            chunk_first,
            chunk_end,
            width,
            shift,
            sizes.k_len,
            causal,
        );
        if class < ALL_CLASSES {
            let counter = class * class_words + unit;
            if counters[counter] < sizes.capacity {
                list[to + counters[counter] as usize] = entry.key;
            }
            counters[counter] += 1u32;
        }
    }
}

/// A list of keys, with the most of a row that are alive at one position.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// The keys that are attended to, by the window.
    Live(&'a LiveKeys),
    /// The runners-up, by [`Far::max_live`](crate::args::Far::max_live).
    RunnersUp(&'a RunnersUp, usize),
}

impl Keys<'_> {
    fn listed(&self) -> Listed {
        match self {
            Self::Live(_) => Listed::Live,
            Self::RunnersUp(..) => Listed::RunnersUp,
        }
    }

    fn max_live(&self, problem: &Problem) -> usize {
        match self {
            Self::Live(_) => problem.window,
            Self::RunnersUp(_, max_live) => *max_live,
        }
    }

    /// Keys, counts, and the positions of the entries.
    fn tensors(&self) -> [TensorBinding; 3] {
        let [keys, counts, positions] = match self {
            Self::Live(live) => [&live.keys, &live.counts, &live.ends],
            Self::RunnersUp(runners, _) => [&runners.keys, &runners.counts, &runners.listed],
        };
        [keys.clone(), counts.clone(), positions.clone()]
    }
}

/// Lists the keys of every chunk of `chunk` queries, in one launch. `chunks` and the rows must fit the
/// device's cube counts.
pub(crate) fn chunk_keys(
    client: &Client,
    problem: &Problem,
    keys: Keys,
    chunk: usize,
) -> ChunkKeys {
    let serial = client.properties().hardware.plane_size_max <= 1;
    chunk_keys_with(client, problem, keys, chunk, if serial { 2 } else { 128 })
}

fn chunk_keys_with(
    client: &Client,
    problem: &Problem,
    keys: Keys,
    chunk: usize,
    units: usize,
) -> ChunkKeys {
    let (lists, counts, starts) = ChunkKeys::shapes(problem, keys.max_live(problem), chunk);
    let [rows, chunks, capacity] = lists;
    let starts = scratch(client, starts);
    let out = ChunkKeys {
        keys: scratch(client, lists),
        counts: scratch(client, counts),
        starts: Some(starts.clone()),
        capacity,
    };
    let [all, all_counts, positions] = keys.tensors();
    let address = address_type([&all, &positions, &out.keys]);
    let positions = Some(positions.into_buffer_arg());
    let (ends, spans) = match keys.listed() {
        Listed::Live => (positions, None),
        Listed::RunnersUp => (None, positions),
    };
    // SAFETY: a row's list has at most `k_len` entries; the kernel writes only below `capacity`.
    unsafe {
        chunk_keys_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, rows as u32, 1),
            CubeDim::new_1d(units as u32),
            address,
            KeyListLaunch::new(
                all.into_buffer_arg(),
                all_counts.into_buffer_arg(),
                ends.into(),
                spans.into(),
            ),
            out.keys.clone().into_buffer_arg(),
            out.counts.clone().into_buffer_arg(),
            starts.into_buffer_arg(),
            ChunkSizesLaunch::new(
                problem.q_len as u32,
                problem.k_len as u32,
                chunk as u32,
                capacity as u32,
            ),
            keys.listed(),
            problem.causal,
            units,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Selection;
    use crate::pattern::intervals::live_keys;
    use crate::testing::{client, read_u32, strided, zeros};
    use flash_dma_problem::{AttentionOptions, ElementType, Interval};
    use flash_dma_reference::compose::max_live;
    use flash_dma_reference::{Rng, select::intervals};

    /// The queries of a chunk that attend to a key.
    fn attended(p: &Problem, interval: &Interval, chunk: std::ops::Range<usize>) -> Vec<usize> {
        chunk
            .filter(|&query| interval.contains(p.position(query)))
            .collect()
    }

    /// Deaths, lives, births, births of keys that die; the times within a class differ by less than its width.
    fn class(
        p: &Problem,
        interval: &Interval,
        chunk: &std::ops::Range<usize>,
        width: usize,
    ) -> (usize, usize) {
        let seen = attended(p, interval, chunk.clone());
        let (first, last) = (seen[0], seen[seen.len() - 1]);
        match (first > chunk.start, last + 1 < chunk.end) {
            (true, false) => (2, (first - chunk.start) / width),
            (true, true) => (3, (first - chunk.start) / width),
            (false, true) => (0, (last - chunk.start) / width),
            (false, false) => (1, 0),
        }
    }

    fn check(q_len: usize, k_len: usize, window: usize, causal: bool, chunk: usize) {
        let client = client();
        let options = AttentionOptions::new()
            .with_keep_window(window)
            .with_causal(causal);
        let (q, k) = ([1, 2, q_len, 8], [1, 2, k_len, 8]);
        let p = Problem::new(&q, &k, &k, Some(&k[..3]), ElementType::F32, &options).unwrap();
        let mut rng = Rng::new(3);
        let rows: Vec<Vec<Interval>> = (0..2)
            .map(|_| {
                let scores: Vec<f64> = (0..k_len).map(|_| rng.normal()).collect();
                intervals(&scores, p.window)
            })
            .collect();
        let words: Vec<u32> = rows
            .iter()
            .flatten()
            .flat_map(|i| [i.first, i.end])
            .collect();
        let selection = Selection {
            scores: zeros(&client, &k[..3]),
            intervals: strided(
                &client,
                &words,
                &[1, 2, k_len, 2],
                &[4 * k_len, 2 * k_len, 2, 1],
            ),
            far: None,
        };
        let live = live_keys(&client, &p, &selection);
        for units in [1, 4] {
            let lists = chunk_keys_with(&client, &p, Keys::Live(&live), chunk, units);
            let [keys, counts, starts] = [lists.keys, lists.counts, lists.starts.unwrap()]
                .map(|words| read_u32(&client, words));
            let chunks = q_len.div_ceil(chunk);
            for (row, n) in (0..2).flat_map(|row| (0..chunks).map(move |n| (row, n))) {
                let queries = n * chunk..((n + 1) * chunk).min(q_len);
                let list = row * chunks + n;
                let listed = &keys[list * lists.capacity..][..counts[list] as usize];
                let mut expected: Vec<u32> = (rows[row].iter().enumerate())
                    .filter(|(_, i)| !attended(&p, i, queries.clone()).is_empty())
                    .map(|(key, _)| key as u32)
                    .collect();
                let width = chunk.div_ceil(CLASSES);
                let place = |&key: &u32| class(&p, &rows[row][key as usize], &queries, width);
                expected.sort_by_key(place);
                assert_eq!(listed, expected, "row {row}, chunk {n}, {units} units");
                let starts = &starts[list * STARTS..][..STARTS];
                assert_eq!((starts[0], starts[STARTS - 1]), (0, counts[list]));
                for class in starts.windows(2) {
                    let keys = &listed[class[0] as usize..class[1] as usize];
                    assert!(keys.is_sorted(), "row {row}, chunk {n}: {keys:?}");
                    assert!(keys.iter().all(|key| place(key) == place(&keys[0])));
                }
            }
        }
    }

    /// Two rows of runners-up in any order, on spans that begin anywhere.
    fn check_runners_up(q_len: usize, k_len: usize, chunk: usize) {
        let client = client();
        let (q, k) = ([1, 2, q_len, 8], [1, 2, k_len, 8]);
        let options = AttentionOptions::new().with_keep_window(3);
        let p = Problem::new(&q, &k, &k, Some(&k[..3]), ElementType::F32, &options).unwrap();
        let mut rng = Rng::new(4);
        let spans: Vec<Vec<Interval>> = (0..2)
            .map(|_| {
                let span = |key: usize| {
                    let first = key + rng.below(k_len - key);
                    let end = first + 1 + rng.below((k_len - first).min(40));
                    Interval {
                        first: first as u32,
                        end: end as u32,
                    }
                };
                (0..k_len).map(span).collect()
            })
            .collect();
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
        let pairs = |words: &[u32]| {
            let strides = [4 * k_len, 2 * k_len, 2, 1];
            strided(&client, words, &[1, 2, k_len, 2], &strides)
        };
        let row_strides = [k_len, 1];
        let runners = RunnersUp {
            keys: strided(&client, &keys, &[2, k_len], &row_strides),
            spans: zeros(&client, &[1, 2, k_len, 2]),
            listed: pairs(&positions),
            counts: strided(&client, &[listed.len() as u32; 2], &[2], &[1]),
        };
        let most = spans.iter().map(|row| {
            let until = row.iter().enumerate().map(|(key, span)| Interval {
                first: key as u32,
                end: span.end,
            });
            max_live(&until.collect::<Vec<_>>())
        });
        let most = Keys::RunnersUp(&runners, most.max().unwrap());
        for units in [1, 4] {
            let lists = chunk_keys_with(&client, &p, most, chunk, units);
            let [keys, counts] = [lists.keys, lists.counts].map(|words| read_u32(&client, words));
            let chunks = q_len.div_ceil(chunk);
            for (row, n) in (0..2).flat_map(|row| (0..chunks).map(move |n| (row, n))) {
                let queries = n * chunk..((n + 1) * chunk).min(q_len);
                let list = row * chunks + n;
                let found = &keys[list * lists.capacity..][..counts[list] as usize];
                let span = |key: u32| &spans[row][key as usize];
                let mut expected = listed.clone();
                expected.retain(|&key| !attended(&p, span(key), queries.clone()).is_empty());
                let width = chunk.div_ceil(CLASSES);
                expected.sort_by_key(|&key| class(&p, span(key), &queries, width));
                assert_eq!(found, expected, "row {row}, chunk {n}, {units} units");
            }
        }
    }

    #[test]
    fn every_chunk_lists_its_runners_up() {
        check_runners_up(200, 200, 64);
        check_runners_up(150, 200, 50);
        check_runners_up(200, 150, 48);
    }

    #[test]
    fn every_chunk_lists_its_keys_by_death_and_birth() {
        check(200, 200, 20, true, 64);
        check(150, 200, 30, true, 50);
        check(200, 150, 30, true, 48);
        check(100, 150, 30, false, 48);
        check(70, 70, 70, true, 70);
    }
}

//! The order in which keys are grouped into tiles for dk and dv.
//!
//! A key tile runs over the queries from its first birth to its last death, so keys that are born together and die
//! together belong together. With independent scores most keys die soon and a few live forever: tiles of neighbours by
//! index would spend most of their work on keys already dead (`docs/kernels/portable.md` has the shares).

use crate::host::scratch::{address_type, bytes, scratch};
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::live::LiveLists;
use crate::pattern::intervals::tiles::most_keys;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Classes of deaths.
const CLASSES: usize = 64;

/// The keys that some query attends to, for each of the `batch * kv_heads` rows; keys that die together are adjacent.
#[derive(Clone, Debug)]
pub(crate) struct OrderedKeys {
    /// Contiguous `[batch * kv_heads, capacity]`, u32: their indices by descending class of death, then ascending;
    /// undefined past the count.
    pub keys: TensorBinding,
    /// Shaped as `keys`: the end of the interval of each entry.
    pub ends: TensorBinding,
    /// Contiguous `[batch * kv_heads]`, u32, at most `capacity`.
    pub counts: TensorBinding,
    pub capacity: usize,
}

/// Positions per class: half a window, as deaths are that far apart anyway, or more if needed to cover all positions.
fn class_width(problem: &Problem) -> usize {
    let half_window = problem.window.min(problem.k_len) / 2;
    half_window.max(problem.k_len.div_ceil(CLASSES)).max(1)
}

/// The class of a key that dies at `end`, 0 for the last.
#[cube]
fn class_of(end: u32, width: u32) -> usize {
    comptime!(CLASSES - 1) - min((end - 1u32) / width, comptime!(CLASSES as u32 - 1)) as usize
}

/// A stable counting sort, by descending class of death, of the live keys of a row that die after the position `from`:
/// one cube per row, one share of the keys per unit.
///
/// | buffer | layout |
/// |---|---|
/// | `live` | see [`LiveKeys`], of `k_len` keys |
/// | `ordered_keys`, `ordered_ends`, `counts` | see [`OrderedKeys`], overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn order_kernel(
    live: &LiveLists,
    ordered_keys: &mut Tensor<u32>,
    ordered_ends: &mut Tensor<u32>,
    counts: &mut Tensor<u32>,
    from: u32,
    k_len: u32,
    class_width: u32,
    #[comptime] units: usize,
) {
    let row = CUBE_POS_X as usize;
    let unit = UNIT_POS as usize;
    let base = row * 2 * k_len as usize;
    let capacity = ordered_keys.stride(0);
    let count = live.counts[row] as usize;
    let share = count.div_ceil(units);
    let start = min(unit * share, count);
    let end = min(start + share, count);

    // For each class and unit: the number of keys, then the place of the next. The units that sum use different banks.
    let class_words = comptime!(units + 1);
    let mut counters = Shared::<[u32]>::new_slice(comptime!(CLASSES * class_words));
    let mut totals = Shared::<[u32]>::new_slice(CLASSES);
    for class in 0..CLASSES {
        counters[class * class_words + unit] = 0u32;
    }
    for n in start..end {
        let death = live.entries[base + n].extract(1usize);
        if death > from {
            counters[class_of(death, class_width) * class_words + unit] += 1u32;
        }
    }
    sync_cube();
    let mut class = unit;
    while class < CLASSES {
        let mut total = 0u32;
        for other in 0..units {
            total += counters[class * class_words + other];
        }
        totals[class] = total;
        class += units;
    }
    sync_cube();
    let mut class = unit;
    while class < CLASSES {
        let mut next = 0u32;
        for before in 0..class {
            next += totals[before];
        }
        for other in 0..units {
            let here = counters[class * class_words + other];
            counters[class * class_words + other] = next;
            next += here;
        }
        if class == comptime!(CLASSES - 1) {
            counts[row] = min(next, capacity as u32);
        }
        class += units;
    }
    sync_cube();
    for n in start..end {
        let interval = live.entries[base + n];
        let (key, death) = (interval.extract(0usize), interval.extract(1usize));
        if death > from {
            let counter = class_of(death, class_width) * class_words + unit;
            let place = counters[counter] as usize;
            counters[counter] += 1u32;
            if place < capacity {
                ordered_keys[row * capacity + place] = key;
                ordered_ends[row * capacity + place] = death;
            }
        }
    }
}

impl OrderedKeys {
    fn shapes(problem: &Problem) -> ([usize; 2], [usize; 1]) {
        let rows = problem.batch * problem.kv_heads;
        ([rows, most_keys(problem, problem.q_len)], [rows])
    }

    /// The bytes of the buffers that [`by_death`] allocates; 0 without scores.
    pub(crate) fn bytes(problem: &Problem) -> usize {
        if !problem.has_scores {
            return 0;
        }
        let (keys, counts) = Self::shapes(problem);
        2 * bytes(keys) + bytes(counts)
    }
}

/// Orders the keys that the queries attend to, without those that died before: the window does not bound their number.
pub(crate) fn by_death(client: &Client, problem: &Problem, live: &LiveKeys) -> OrderedKeys {
    let serial = client.properties().hardware.plane_size_max <= 1;
    by_death_with(client, problem, live, if serial { 1 } else { 32 })
}

fn by_death_with(client: &Client, problem: &Problem, live: &LiveKeys, units: usize) -> OrderedKeys {
    let rows = problem.batch * problem.kv_heads;
    let (keys, counts) = OrderedKeys::shapes(problem);
    let [_, capacity] = keys;
    let ordered = OrderedKeys {
        keys: scratch(client, keys),
        ends: scratch(client, keys),
        counts: scratch(client, counts),
        capacity,
    };
    // Positions before key 0 see nothing.
    let from = problem.position(0).max(0) as u32;
    // SAFETY: a row's live keys are at most `k_len`; the kernel writes only below `capacity`.
    unsafe {
        order_kernel::launch_unchecked(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            address_type([&live.entries, &ordered.keys]),
            live.lists(),
            ordered.keys.clone().into_tensor_arg(),
            ordered.ends.clone().into_tensor_arg(),
            ordered.counts.clone().into_tensor_arg(),
            from,
            problem.k_len as u32,
            class_width(problem) as u32,
            units,
        );
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::intervals::live_keys;
    use crate::pattern::intervals::tests::{problem, rows_of};
    use crate::testing::{client, read_u32, selection};
    use flash_dma_problem::Interval;
    use flash_dma_reference::generate::Scores;

    /// Two rows of `k_len` keys and a window of 30.
    fn check(q_len: usize, k_len: usize, causal: bool) {
        let client = client();
        let p = problem(2, q_len, k_len, 30, causal);
        let rows = rows_of([Scores::Normal; 2], k_len, p.window, 5);
        let live = live_keys(&client, &p, &selection(&client, &rows));
        let width = class_width(&p) as u32;
        for units in [1, 4] {
            let ordered = by_death_with(&client, &p, &live, units);
            let capacity = ordered.capacity;
            let [keys, ends, counts] =
                [ordered.keys, ordered.ends, ordered.counts].map(|t| read_u32(&client, t));
            for (row, intervals) in rows.iter().enumerate() {
                let attended = |i: &&Interval| (0..q_len).any(|at| i.contains(p.position(at)));
                let mut expected: Vec<&Interval> = intervals.iter().filter(attended).collect();
                expected.sort_by_key(|i| core::cmp::Reverse((i.end - 1) / width));
                assert_eq!(counts[row] as usize, expected.len(), "row {row}");
                for (at, interval) in expected.iter().enumerate() {
                    let got = [keys[row * capacity + at], ends[row * capacity + at]];
                    let wanted = [interval.first, interval.end];
                    assert_eq!(got, wanted, "row {row}, {units} units, entry {at}");
                }
            }
        }
    }

    #[test]
    fn keys_are_ordered_by_death_and_stay_in_order_within_a_class() {
        check(203, 203, true);
        check(250, 203, true);
    }

    /// The number of listed keys is bounded by the window and the queries; the number of all live keys is not.
    #[test]
    fn keys_that_die_before_the_first_query_are_not_listed() {
        check(1, 203, true);
        check(7, 203, true);
        check(203, 203, false);
        check(7, 203, false);
    }
}

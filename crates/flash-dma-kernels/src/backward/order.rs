//! The order in which keys are grouped into tiles for dk and dv.
//!
//! A key tile runs over the queries from its first birth to its last death, so keys born together that
//! die together belong together. With independent scores most keys die soon and a few live for ever:
//! tiles of neighbours by index would spend most of their work on keys already dead
//! (`docs/kernel-notes.md` has the shares).

use crate::lists::LiveKeys;
use crate::scratch::{address_type, scratch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Classes of deaths.
const CLASSES: usize = 64;

/// Positions a class spans: half a window, as keys die that much apart anyway, unless the classes would
/// not cover all positions.
fn class_width(problem: &Problem) -> usize {
    let half_window = problem.window.min(problem.k_len) / 2;
    half_window.max(problem.k_len.div_ceil(CLASSES)).max(1)
}

/// The class of a key that dies at `end`, 0 for the last.
#[cube]
fn class_of(end: u32, width: u32) -> usize {
    comptime!(CLASSES - 1) - min((end - 1u32) / width, comptime!(CLASSES as u32 - 1)) as usize
}

/// A stable counting sort of the live keys of a row by descending class of death: one cube a row, a
/// segment of the keys a unit.
///
/// | buffer | layout |
/// |---|---|
/// | `keys`, `ends`, `counts` | see [`LiveKeys`] |
/// | `ordered_keys`, `ordered_ends` | as `keys` and `ends`, overwritten up to the row's count |
#[cube(launch_unchecked, address_type = "dynamic")]
fn order_kernel(
    keys: &Tensor<u32>,
    ends: &Tensor<u32>,
    counts: &Tensor<u32>,
    ordered_keys: &mut Tensor<u32>,
    ordered_ends: &mut Tensor<u32>,
    class_width: u32,
    #[comptime] units: usize,
) {
    let row = CUBE_POS_X as usize;
    let unit = UNIT_POS as usize;
    let base = row * keys.stride(0);
    let count = counts[row] as usize;
    let segment = count.div_ceil(units);
    let start = min(unit * segment, count);
    let end = min(start + segment, count);

    // Of each class and unit: the number of keys, then where its next key goes.
    let mut slots = Shared::<[u32]>::new_slice(comptime!(CLASSES * units));
    let mut totals = Shared::<[u32]>::new_slice(CLASSES);
    for class in 0..CLASSES {
        slots[class * units + unit] = 0u32;
    }
    for n in start..end {
        let class = class_of(ends[base + n], class_width);
        slots[class * units + unit] += 1u32;
    }
    sync_cube();
    let mut class = unit;
    while class < CLASSES {
        let mut total = 0u32;
        for other in 0..units {
            total += slots[class * units + other];
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
            let here = slots[class * units + other];
            slots[class * units + other] = next;
            next += here;
        }
        class += units;
    }
    sync_cube();
    for n in start..end {
        let (key, end) = (keys[base + n], ends[base + n]);
        let slot = class_of(end, class_width) * units + unit;
        let to = base + slots[slot] as usize;
        slots[slot] += 1u32;
        ordered_keys[to] = key;
        ordered_ends[to] = end;
    }
}

/// The live keys, those of each row ordered by descending class of death, then by index.
pub(crate) fn by_death(client: &Client, problem: &Problem, live: &LiveKeys) -> LiveKeys {
    let serial = client.properties().hardware.plane_size_max <= 1;
    by_death_with(client, problem, live, if serial { 1 } else { 32 })
}

fn by_death_with(client: &Client, problem: &Problem, live: &LiveKeys, units: usize) -> LiveKeys {
    let rows = problem.batch * problem.kv_heads;
    let ordered = LiveKeys {
        keys: scratch(client, [rows, problem.k_len]),
        ends: scratch(client, [rows, problem.k_len]),
        counts: live.counts.clone(),
    };
    // SAFETY: a row's counts add up to at most its `k_len` entries, where all accesses stay.
    unsafe {
        order_kernel::launch_unchecked(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            address_type([&live.keys]),
            live.keys.clone().into_tensor_arg(),
            live.ends.clone().into_tensor_arg(),
            live.counts.clone().into_tensor_arg(),
            ordered.keys.clone().into_tensor_arg(),
            ordered.ends.clone().into_tensor_arg(),
            class_width(problem) as u32,
            units,
        );
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{client, read_u32, strided};
    use flash_dma_problem::{AttentionOptions, ElementType};
    use flash_dma_reference::Rng;

    #[test]
    fn keys_are_ordered_by_death_and_stay_in_order_within_a_class() {
        let (client, n) = (client(), 203);
        let k = [1, 2, n, 8];
        let options = AttentionOptions::new().with_keep_window(30);
        let p = Problem::new(&k, &k, &k, Some(&k[..3]), ElementType::F32, &options).unwrap();
        let mut rng = Rng::new(5);
        let counts = [n as u32, 57];
        let keys: Vec<u32> = (0..2).flat_map(|_| 0..n as u32).collect();
        let ends: Vec<u32> = (keys.iter())
            .map(|&key| key + 1 + rng.below(n - key as usize) as u32)
            .collect();
        let upload = |values: &[u32], shape: &[usize]| {
            strided(
                &client,
                values,
                shape,
                &[*shape.last().unwrap(), 1][2 - shape.len()..],
            )
        };
        let live = LiveKeys {
            keys: upload(&keys, &[2, n]),
            ends: upload(&ends, &[2, n]),
            counts: upload(&counts, &[2]),
        };
        for units in [1, 4] {
            let ordered = by_death_with(&client, &p, &live, units);
            let actual = [ordered.keys, ordered.ends].map(|t| read_u32(&client, t));
            for row in 0..2 {
                let mut expected: Vec<(u32, u32)> = (0..counts[row] as usize)
                    .map(|at| (keys[row * n + at], ends[row * n + at]))
                    .collect();
                // Half a window wide, the last first.
                expected.sort_by_key(|&(_, end)| core::cmp::Reverse((end - 1) / 15));
                for (at, &(key, end)) in expected.iter().enumerate() {
                    let got = [actual[0][row * n + at], actual[1][row * n + at]];
                    assert_eq!(got, [key, end], "row {row}, {units} units, entry {at}");
                }
            }
        }
    }
}

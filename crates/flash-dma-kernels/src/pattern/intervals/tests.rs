use crate::pattern::intervals::live::{BLOCK, BRIEF};
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{live_keys, live_keys_with, tile_key_lists, tile_key_lists_with};
use crate::team::Team;
use crate::testing::{self, client, read_u32, selection};
use crate::{AttentionOptions, ElementType, Problem};
use flash_dma_problem::Interval;
use flash_dma_reference::generate::Scores;
use flash_dma_reference::{Rng, select::intervals};

pub(super) fn problem(
    heads: usize,
    q_len: usize,
    k_len: usize,
    window: usize,
    causal: bool,
) -> Problem {
    let options = AttentionOptions::new()
        .with_keep_window(window)
        .with_causal(causal);
    let (q, kv) = ([1, heads, q_len, 8], [heads, k_len]);
    testing::problem(q, kv, true, ElementType::F32, &options)
}

/// Makes all lists, slice by slice, and compares them with their definition.
fn check(problem: &Problem, rows: &[Vec<Interval>], tile_size: usize, slices: usize) {
    check_team(problem, rows, tile_size, slices, Team::new(&client(), 1));
}

/// [`check`] with cubes of several planes.
fn check_team(
    problem: &Problem,
    rows: &[Vec<Interval>],
    tile_size: usize,
    slices: usize,
    team: Team,
) {
    let client = client();
    let live = live_keys_with(&client, problem, &selection(&client, rows), team);
    let n = problem.k_len;
    let [entries, counts, starts] =
        [&live.entries, &live.counts, &live.starts].map(|b| read_u32(&client, b.clone()));
    let blocks = n.div_ceil(BLOCK);
    for (r, row) in rows.iter().enumerate() {
        let filtered = |lists: &dyn Fn(&Interval) -> bool| -> Vec<Interval> {
            row.iter().copied().filter(lists).collect()
        };
        let live = filtered(&|i| !i.is_empty());
        let lasting = filtered(&|i| i.end > i.first + BRIEF as u32);
        assert_eq!(counts[r] as usize, live.len(), "row {r}");
        for (list, expected) in [live, lasting].iter().enumerate() {
            let (pairs, _) = entries[(2 * r + list) * n * 2..].as_chunks();
            let interval = |&[first, end]: &[u32; 2]| Interval { first, end };
            let listed: Vec<_> = pairs.iter().take(expected.len()).map(interval).collect();
            assert_eq!(&listed, expected, "list {list} of row {r}");
            for block in 0..blocks {
                let before = expected.partition_point(|i| i.first < (block * BLOCK) as u32);
                let start = starts[(r * blocks + block) * 2 + list] as usize;
                assert_eq!(start, before, "list {list} of row {r}, block {block}");
            }
        }
    }

    let tiles = QueryTiles::new(problem, tile_size);
    let step = tiles.lists.div_ceil(slices).max(1);
    for start in (0..tiles.lists).step_by(step) {
        let slice = start..(start + step).min(tiles.lists);
        let lists = tile_key_lists_with(&client, problem, &live, &tiles, slice.clone(), team);
        let [keys, counts] = [lists.keys, lists.counts].map(|words| read_u32(&client, words));
        for (r, row) in rows.iter().enumerate() {
            for tile in slice.clone() {
                let queries = if problem.causal {
                    tile * tile_size..((tile + 1) * tile_size).min(problem.q_len)
                } else {
                    0..problem.q_len
                };
                let seen_by = |i: &Interval| {
                    let sees = |&q: &usize| i.contains(problem.position(q));
                    queries.clone().filter(sees).count()
                };
                let listed = |all: bool| -> Vec<u32> {
                    let belongs = |i: &&Interval| match seen_by(i) {
                        0 => false,
                        some => (some == queries.len()) == all,
                    };
                    row.iter().filter(belongs).map(|i| i.first).collect()
                };
                let list = r * slice.len() + tile - slice.start;
                let [full, total] = [counts[list * 2], counts[list * 2 + 1]].map(|c| c as usize);
                let list = &keys[list * tiles.capacity..][..total];
                let what = format!("row {r}, tile {tile} of {tile_size}, {problem:?}");
                assert_eq!(list[..full], listed(true), "full keys of {what}");
                assert_eq!(list[full..], listed(false), "boundary keys of {what}");
            }
        }
    }
}

fn planes(planes: usize) -> Team {
    Team { lanes: 1, planes }
}

fn rows(heads: usize, n: usize, window: usize, seed: u64) -> Vec<Vec<Interval>> {
    let kinds = Scores::ALL.into_iter().cycle();
    rows_of(kinds.take(heads), n, window, seed)
}

/// Keys that a window keeps of `n` keys of each kind of scores.
pub(super) fn rows_of(
    kinds: impl IntoIterator<Item = Scores>,
    n: usize,
    window: usize,
    seed: u64,
) -> Vec<Vec<Interval>> {
    let mut rng = Rng::new(seed);
    let kept = |kind: Scores| intervals(&kind.head(n, &mut rng), window);
    kinds.into_iter().map(kept).collect()
}

#[test]
fn lists_hold_exactly_the_keys_of_each_tile() {
    for [q_len, k_len] in [[1; 2], [17; 2], [5, 40], [129; 2], [300; 2], [100, 290]] {
        for window in [1, 3, 16, k_len] {
            let heads = Scores::ALL.len();
            let rows = rows(heads, k_len, window, (q_len * k_len + window) as u64);
            for causal in [true, false] {
                let problem = problem(heads, q_len, k_len, window, causal);
                for tile_size in [1, 16, 64] {
                    check(&problem, &rows, tile_size, 1);
                }
                check(&problem, &rows, 7, 3);
            }
        }
    }
}

#[test]
fn planes_share_a_list() {
    // Several rounds of waiting entries, and tile counts that leave planes without work.
    let team = planes(3);
    let rows = rows(3, 150, 120, 9);
    for causal in [true, false] {
        check_team(&problem(3, 130, 150, 120, causal), &rows, 16, 2, team);
    }
}

#[test]
fn queries_before_the_first_key_have_empty_lists() {
    for (q_len, k_len) in [(40, 9), (20, 1), (33, 32)] {
        let rows = rows(4, k_len, 3, q_len as u64);
        for causal in [true, false] {
            check(&problem(4, q_len, k_len, 3, causal), &rows, 8, 2);
        }
    }
}

#[test]
fn no_keys_and_no_queries_make_empty_lists() {
    for causal in [true, false] {
        check(&problem(2, 20, 0, 3, causal), &[vec![], vec![]], 8, 1);
        check(&problem(2, 0, 20, 3, causal), &rows(2, 20, 3, 1), 8, 1);
    }
}

/// The tiles of two rows of more keys than a window of 2 allows, and the keys and counts of their lists.
fn overfull(row: Vec<Interval>, tile_size: usize) -> (QueryTiles, Vec<u32>, Vec<u32>) {
    let problem = problem(2, row.len(), row.len(), 2, true);
    let client = client();
    let live = live_keys(&client, &problem, &selection(&client, &[row.clone(), row]));
    let tiles = QueryTiles::new(&problem, tile_size);
    let lists = tile_key_lists(&client, &problem, &live, &tiles, 0..tiles.lists);
    let [keys, counts] = [lists.keys, lists.counts].map(|words| read_u32(&client, words));
    (tiles, keys, counts)
}

#[test]
fn foreign_intervals_do_not_write_past_the_capacity() {
    // Every key lives forever: far more than the window of 2 allows.
    let forever = |first| Interval {
        first,
        end: u32::MAX >> 1,
    };
    let (tiles, keys, counts) = overfull((0..50).map(forever).collect(), 4);
    assert_eq!(tiles.capacity, 5);
    // Tile 0 has one full key and three boundary keys; all others overflow.
    for row in counts.chunks(tiles.lists * 2) {
        assert_eq!(row[..2], [1, 4]);
        assert!(row[2..].iter().all(|&c| c == 5));
    }
    let last_of_row_0 = (tiles.lists - 1) * tiles.capacity;
    assert_eq!(keys[last_of_row_0..][..5], [0, 1, 2, 3, 4]);
    let first_of_row_1 = tiles.lists * tiles.capacity;
    assert_eq!(keys[first_of_row_1..][..4], [0, 1, 2, 3]);
}

/// Intervals that end where `end(key)` says, clipped to `key..=n`.
fn given(n: usize, end: impl Fn(usize) -> usize) -> Vec<Interval> {
    let interval = |j: usize| Interval {
        first: j as u32,
        end: end(j).clamp(j, n) as u32,
    };
    (0..n).map(interval).collect()
}

#[test]
fn brief_keys_that_are_gone_are_not_read() {
    // Lifetimes on both sides of the limit, in several blocks, with keys that never live among them.
    let n = 5 * BLOCK + 77;
    let rows = [
        given(n, |j| j + [BRIEF, 0, BRIEF + 1, 3, n][j % 5]),
        given(n, |j| j + 100),
        given(n, |j| j + if j % 97 == 0 { n } else { BRIEF }),
    ];
    let window = most_alive(&rows, n);
    let several = planes(5);
    for q_len in [n, n / 2] {
        let causal = problem(3, q_len, n, window, true);
        check(&causal, &rows, 64, 1);
        check_team(&causal, &rows, 33, 2, several);
        check(&problem(3, q_len, n, window, false), &rows, 64, 1);
    }
}

fn most_alive(rows: &[Vec<Interval>], n: usize) -> usize {
    let alive = |row: &Vec<Interval>, p| row.iter().filter(|i| i.contains(p)).count();
    let most = |row| (0..n as i64).map(move |p| alive(row, p)).max();
    rows.iter().filter_map(most).max().unwrap_or(0)
}

#[test]
fn boundary_keys_spill_where_many_die_at_once() {
    let n = 700;
    let several = planes(3);
    // Documents whose ends lie inside tiles; all keys dying at one position; deaths in the first and last query of a
    // tile; two mass deaths within one tile, with survivors among them; and everything alive to the end.
    let ends: [&dyn Fn(usize) -> usize; 5] = [
        &|j| [131, 330, 331, 655, 700][[131, 330, 331, 655].iter().filter(|&&e| e <= j).count()],
        &|_| 401,
        &|j| if j % 2 == 0 { 448 } else { 449 },
        &|j| [j + 3, 500, 505, 700][j % 4],
        &|_| 700,
    ];
    let rows: Vec<_> = ends.iter().map(|end| given(n, end)).collect();
    for row in rows {
        let rows = [row];
        let window = most_alive(&rows, n);
        for q_len in [n, 333] {
            for causal in [true, false] {
                let problem = problem(1, q_len, n, window, causal);
                for tile_size in [1, 16, 50, 64] {
                    check(&problem, &rows, tile_size, 1);
                }
                check_team(&problem, &rows, 32, 2, several);
            }
        }
    }
}

/// All keys die inside a tile, and the spilled ones fill more than half of the places that are left.
#[test]
fn spilled_keys_that_stand_on_each_others_places_are_in_order() {
    let n = 200;
    let rows = [given(n, |_| 150)];
    check(&problem(1, n, n, 150, true), &rows, 16, 1);
}

#[test]
fn more_deaths_than_the_capacity_do_not_write_past_it() {
    // Far more keys than the window of 2 allows die inside tile 12: boundary keys fill its list.
    let n = 300;
    let (tiles, keys, counts) = overfull(given(n, |_| 198), 16);
    assert_eq!(tiles.capacity, 17);
    let all = keys.chunks(17).zip(counts.chunks(2));
    for (list, count) in all.skip(12).step_by(tiles.lists) {
        assert_eq!(count, [0, 17]);
        assert!(list.iter().all(|&key| key < n as u32), "{list:?}");
    }
}

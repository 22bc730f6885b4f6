//! The cut of queries into tiles, and the memory of their lists.

use flash_dma_problem::Problem;
use std::ops::Range;

/// The most bytes of the lists of one slice of tiles, unless a single tile takes more.
///
/// A launch has to fill the device; 32K tokens of 8 heads, window 2048, take 65 MiB in tiles of 32 queries: one slice.
const SLICE_BYTES: usize = 144 << 20;

/// Words per list in the counts.
const COUNT_WORDS: usize = 2;

/// The query tiles of a problem: tile `t` holds the queries `t * size .. min((t + 1) * size, q_len)`.
///
/// Without causal masking every query attends to the same keys. All tiles then share one list: `lists` is 1, and every
/// tile reads list 0. With it, `lists` equals `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueryTiles {
    pub size: usize,
    /// Number of tiles that cover the queries.
    pub count: usize,
    /// Number of key lists that the tiles read.
    pub lists: usize,
    /// The most keys that one tile can attend to, at least 1.
    pub capacity: usize,
}

/// The most keys that `queries` consecutive queries attend to: the window at the first one's position, and, with causal
/// masking, one newborn at each further position.
pub(crate) fn most_keys(problem: &Problem, queries: usize) -> usize {
    most_alive(problem, problem.window, queries)
}

/// [`most_keys`] for intervals of which at most `max_live` hold any one position.
pub(crate) fn most_alive(problem: &Problem, max_live: usize, queries: usize) -> usize {
    let newborn = match problem.causal {
        true => queries.saturating_sub(1),
        false => 0,
    };
    max_live.saturating_add(newborn).min(problem.k_len)
}

impl QueryTiles {
    /// Cuts the queries of `problem` into tiles of `size`, which must not be 0.
    pub(crate) fn new(problem: &Problem, size: usize) -> Self {
        let count = problem.q_len.div_ceil(size);
        Self {
            size,
            count,
            lists: if problem.causal { count } else { count.min(1) },
            capacity: most_keys(problem, size).max(1),
        }
    }

    /// Cuts the lists of `rows = batch * kv_heads` into slices of bounded memory, for one launch each: all would take
    /// `q_len * window / size` words per row, which is not O(N) if the window grows with N.
    pub(crate) fn slices(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let list_bytes = rows.max(1) * (self.capacity + COUNT_WORDS) * size_of::<u32>();
        let (lists, most) = (self.lists, (SLICE_BYTES / list_bytes).max(1));
        // Slices of equal size, so that none is too small to fill the device.
        let step = lists.div_ceil(lists.div_ceil(most).max(1)).max(1);
        (0..lists)
            .step_by(step)
            .map(move |start| start..(start + step).min(lists))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use flash_dma_problem::{AttentionOptions, ElementType};

    fn problem(q_len: usize, k_len: usize, options: AttentionOptions) -> Problem {
        let (q, kv) = ([1, 2, q_len, 8], [2, k_len]);
        testing::problem(q, kv, true, ElementType::F32, &options)
    }

    #[test]
    fn a_list_has_room_for_the_window_and_one_newborn_a_position() {
        let causal = AttentionOptions::new().with_keep_window(5);
        let tiles = QueryTiles::new(&problem(33, 64, causal), 16);
        assert_eq!((tiles.count, tiles.lists, tiles.capacity), (3, 3, 20));
        let full = causal.with_causal(false);
        let tiles = QueryTiles::new(&problem(33, 64, full), 16);
        assert_eq!((tiles.count, tiles.lists, tiles.capacity), (3, 1, 5));
        let dense = AttentionOptions::new();
        assert_eq!(QueryTiles::new(&problem(33, 64, dense), 16).capacity, 64);
        assert_eq!(QueryTiles::new(&problem(0, 64, dense), 16).lists, 0);
        assert_eq!(QueryTiles::new(&problem(3, 0, dense), 16).capacity, 1);
    }

    #[test]
    fn slices_cover_every_list_once_within_the_budget() {
        let options = AttentionOptions::new().with_keep_window(1 << 15);
        let tiles = QueryTiles::new(&problem(1 << 17, 1 << 17, options), 64);
        let slices: Vec<_> = tiles.slices(8).collect();
        assert!(slices.len() > 1);
        assert_eq!(slices[0].start, 0);
        assert_eq!(slices.last().unwrap().end, tiles.lists);
        assert!(slices.windows(2).all(|s| s[0].end == s[1].start));
        let bytes = |lists: usize| lists * 8 * (tiles.capacity + COUNT_WORDS) * 4;
        assert!(slices.iter().all(|s| bytes(s.len()) <= SLICE_BYTES));
    }
}

//! Which keys a tile of queries attends to.

use flash_dma_problem::Interval;

/// The keys that at least one position of a range attends to, in index order. A key of this list is
/// named by its *slot*, its place in the list.
pub(crate) struct RangeKeys {
    /// Index of each key: also the first position that attends to it.
    pub(crate) index: Vec<u32>,
    /// One past the last position that attends to each key.
    end: Vec<u32>,
}

impl RangeKeys {
    /// The keys of the positions `first..=last`. Without intervals a key is attended from its own
    /// position on.
    pub(crate) fn new(intervals: Option<&[Interval]>, k_len: usize, first: i64, last: i64) -> Self {
        let visible = (last + 1).clamp(0, k_len as i64) as usize;
        match intervals {
            None => Self {
                index: (0..visible as u32).collect(),
                end: vec![k_len as u32; visible],
            },
            Some(intervals) => {
                let first = first.max(0) as u32;
                let (mut index, mut end) = (Vec::new(), Vec::new());
                for (j, interval) in intervals[..visible].iter().enumerate() {
                    if interval.end > first.max(j as u32) {
                        index.push(j as u32);
                        end.push(interval.end);
                    }
                }
                Self { index, end }
            }
        }
    }

    /// Number of slots.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }
}

/// The keys of one query tile, carried from tile to tile: a key enters once and leaves once, so the
/// lists of a whole range cost its keys plus what the tiles attend to.
#[derive(Default)]
pub(crate) struct TileKeys {
    /// Slots of the keys that were born and are not evicted, in index order.
    alive: Vec<u32>,
    /// The first slot that was not born yet.
    next: usize,
    /// Slots the tile attends to: first those every query attends to, then the boundary keys; each
    /// part in index order.
    pub(crate) slots: Vec<u32>,
    /// How many slots every query of the tile attends to.
    pub(crate) full: usize,
    /// For each boundary key the queries `start..end` of the tile that attend to it.
    pub(crate) queries: Vec<(i32, i32)>,
}

impl TileKeys {
    /// Starts over, before the first tile of a range.
    pub(crate) fn restart(&mut self) {
        self.alive.clear();
        self.next = 0;
    }

    /// Lists the keys of the positions `first..=last`, which must not go back.
    pub(crate) fn advance(&mut self, keys: &RangeKeys, first: i64, last: i64) {
        let in_view = |slot: u32| i64::from(keys.end[slot as usize]) > first;
        self.alive.retain(|&slot| in_view(slot));
        while self.next < keys.len() && i64::from(keys.index[self.next]) <= last {
            if in_view(self.next as u32) {
                self.alive.push(self.next as u32);
            }
            self.next += 1;
        }
        self.slots.clear();
        self.queries.clear();
        let span = |slot: u32| {
            let (birth, end) = (keys.index[slot as usize], keys.end[slot as usize]);
            (i64::from(birth), i64::from(end))
        };
        let is_full = |slot: u32| {
            let (birth, end) = span(slot);
            birth <= first && end > last
        };
        self.slots
            .extend(self.alive.iter().copied().filter(|&slot| is_full(slot)));
        self.full = self.slots.len();
        for &slot in self.alive.iter().filter(|&&slot| !is_full(slot)) {
            let (birth, end) = span(slot);
            let query = |position: i64| (position - first).clamp(0, last - first + 1) as i32;
            self.slots.push(slot);
            self.queries.push((query(birth), query(end)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tile_lists_hold_exactly_the_attended_pairs() {
        let k_len = 40usize;
        let intervals: Vec<Interval> = (0..k_len as u32)
            .map(|j| Interval {
                first: j,
                end: j + [0, 3, 40, 1, 9, 0, 17][j as usize % 7].min(k_len as u32 - j),
            })
            .collect();
        for (start, stop, step) in [(-5i64, 40i64, 7), (0, 40, 1), (12, 33, 16), (-9, -2, 4)] {
            let keys = RangeKeys::new(Some(&intervals), k_len, start, stop - 1);
            let mut tile = TileKeys::default();
            let mut first = start;
            while first < stop {
                let last = (first + step).min(stop) - 1;
                tile.advance(&keys, first, last);
                let mut pairs = Vec::new();
                for (place, &slot) in tile.slots.iter().enumerate() {
                    let (from, to) = match place.checked_sub(tile.full) {
                        None => (0, (last - first + 1) as i32),
                        Some(boundary) => tile.queries[boundary],
                    };
                    assert!(from < to, "a listed key has a query");
                    for i in from..to {
                        pairs.push((first + i64::from(i), keys.index[slot as usize] as usize));
                    }
                }
                pairs.sort_unstable();
                let exact: Vec<_> = (first..=last)
                    .flat_map(|p| (0..k_len).map(move |j| (p, j)))
                    .filter(|&(p, j)| intervals[j].contains(p))
                    .collect();
                assert_eq!(pairs, exact);
                first = last + 1;
            }
        }
    }
}

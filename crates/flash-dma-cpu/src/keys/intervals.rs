//! Lists of a tile's keys by their intervals: first the *full* keys, which all queries attend to, then the *boundary*
//! keys.

use super::KeyList;
use crate::position::Span;
use crate::queries::KvHead;
use crate::view::View;
use flash_dma_problem::Interval;
use std::ops::Range;

/// The keys whose ranks learn, each on some positions, unless its score is −∞.
#[derive(Clone, Copy)]
pub(crate) struct Ranked<'a> {
    /// Contiguous `[batch, kv_heads, k_len]`.
    pub(crate) intervals: &'a [Interval],
    pub(crate) positions: RankedPositions<'a>,
    pub(crate) scores: View<'a, f32, 3>,
}

/// The positions at which a key's rank learns; contiguous `[batch, kv_heads, k_len]`.
#[derive(Clone, Copy)]
pub(crate) enum RankedPositions<'a> {
    /// Of runners-up: the positions from the end of the key's interval to before this one.
    RunnersUp(&'a [u32]),
    /// Of kept keys: the positions from this one to the end of the key's interval.
    Kept(&'a [u32]),
}

/// The keys of a chunk of queries, listed tile by tile. A key enters once and leaves once, so the lists of a whole
/// chunk cost its keys plus what the tiles attend to.
#[derive(Default)]
pub(crate) struct IntervalLists {
    pub(crate) keys: KeyList,
    /// The first position of each entry if it is not the key's index; ascending.
    first: Option<Vec<u32>>,
    /// One past the last position of each entry.
    end: Vec<u32>,
    /// Entries that were born and are not evicted, in index order.
    alive: Vec<u32>,
    /// The first entry that was not born yet.
    next: usize,
    /// Number of the tile's keys that every query attends to; they come first. Each part is in index order.
    pub(crate) full: usize,
    /// For each boundary key (those after the full ones), the queries `start..end` of the tile that attend to it.
    queries: Vec<(i32, i32)>,
}

impl IntervalLists {
    /// The keys that some position of a chunk attends to. Without intervals a key is attended to from its own position
    /// on.
    pub(crate) fn new(intervals: Option<&[Interval]>, k_len: usize, chunk: Span) -> Self {
        let visible = (chunk.last + 1).clamp(0, k_len as i64) as usize;
        let (index, end) = match intervals {
            None => ((0..visible as u32).collect(), vec![k_len as u32; visible]),
            Some(intervals) => {
                let first = chunk.first.max(0) as u32;
                let (mut index, mut end) = (Vec::new(), Vec::new());
                for (j, interval) in intervals[..visible].iter().enumerate() {
                    if interval.end > first.max(j as u32) {
                        index.push(j as u32);
                        end.push(interval.end);
                    }
                }
                (index, end)
            }
        };
        // Allocated at once: growing them would be noticeable if a chunk is the one query of a decode step.
        let [alive, entries] = [(); 2].map(|()| Vec::with_capacity(index.len()));
        Self {
            keys: KeyList { index, entries },
            end,
            alive,
            ..Self::default()
        }
    }

    /// The keys of a kv head whose ranks learn at some position of a chunk, by their first such position.
    pub(crate) fn ranked(
        ranked: &Ranked<'_>,
        k_len: usize,
        KvHead { batch, head }: KvHead,
        chunk: Span,
    ) -> Self {
        let row = batch * ranked.scores.shape[1] + head;
        let first_key = row * k_len;
        let scores = ranked.scores.row(batch, head);
        let positions = |j: usize| {
            let Interval { first, end } = ranked.intervals[first_key + j];
            match ranked.positions {
                RankedPositions::RunnersUp(far) => (end, far[first_key + j]),
                RankedPositions::Kept(from) => (from[first_key + j].max(first), end),
            }
        };
        let mut lives: Vec<(u32, u32, u32)> = (0..k_len)
            .filter_map(|j| {
                let (first, end) = positions(j);
                let seen = i64::from(first) <= chunk.last && i64::from(end) > chunk.first;
                let learns = seen && first < end && scores[j] != f32::NEG_INFINITY;
                learns.then_some((first, end, j as u32))
            })
            .collect();
        lives.sort_unstable();
        Self {
            keys: KeyList {
                index: lives.iter().map(|&(.., j)| j).collect(),
                entries: Vec::new(),
            },
            first: Some(lives.iter().map(|&(first, ..)| first).collect()),
            end: lives.iter().map(|&(_, end, _)| end).collect(),
            ..Self::default()
        }
    }

    /// Lists the keys of a tile, whose positions must not go back.
    pub(crate) fn advance(&mut self, Span { first, last }: Span) {
        let KeyList { index, entries } = &mut self.keys;
        let (births, end) = (self.first.as_ref().unwrap_or(index), &self.end);
        let in_view = |entry: u32| i64::from(end[entry as usize]) > first;
        self.alive.retain(|&entry| in_view(entry));
        while self.next < index.len() && i64::from(births[self.next]) <= last {
            if in_view(self.next as u32) {
                self.alive.push(self.next as u32);
            }
            self.next += 1;
        }
        entries.clear();
        self.queries.clear();
        let life = |entry: u32| {
            let (birth, end) = (births[entry as usize], end[entry as usize]);
            (i64::from(birth), i64::from(end))
        };
        let is_full = |entry: u32| {
            let (birth, end) = life(entry);
            birth <= first && end > last
        };
        entries.extend(self.alive.iter().copied().filter(|&entry| is_full(entry)));
        self.full = entries.len();
        for &entry in self.alive.iter().filter(|&&entry| !is_full(entry)) {
            let (birth, end) = life(entry);
            let query = |position: i64| (position - first).clamp(0, last - first + 1) as i32;
            entries.push(entry);
            self.queries.push((query(birth), query(end)));
        }
    }

    /// The queries of the tile that attend to its boundary keys among `places`.
    pub(crate) fn boundary(&self, places: &Range<usize>) -> &[(i32, i32)] {
        let boundary = |place: usize| place.max(self.full) - self.full;
        &self.queries[boundary(places.start)..boundary(places.end)]
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
            let chunk = Span {
                first: start,
                last: stop - 1,
            };
            let mut lists = IntervalLists::new(Some(&intervals), k_len, chunk);
            let mut first = start;
            while first < stop {
                let last = (first + step).min(stop) - 1;
                lists.advance(Span { first, last });
                let KeyList { index, entries } = &lists.keys;
                let mut pairs = Vec::new();
                for (place, &entry) in entries.iter().enumerate() {
                    let (from, to) = match lists.boundary(&(place..place + 1)) {
                        [] => (0, (last - first + 1) as i32),
                        queries => queries[0],
                    };
                    assert!(from < to, "a listed key has a query");
                    for i in from..to {
                        pairs.push((first + i64::from(i), index[entry as usize] as usize));
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

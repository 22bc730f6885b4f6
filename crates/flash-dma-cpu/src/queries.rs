//! The rows of a tile: the queries of every query head that shares a key/value head.

use crate::element::Element;
use crate::scratch::Buffer;
use crate::view::View;
use std::ops::Range;

#[derive(Clone, Copy)]
pub(crate) struct KvHead {
    pub(crate) batch: usize,
    /// Index among the key/value heads of the sequence.
    pub(crate) head: usize,
}

/// A range of queries of each query head of a group, head after head: row `h * queries.len() + i` is query
/// `queries.start + i` of the group's head `h`.
#[derive(Clone)]
pub(crate) struct QueryRows {
    pub(crate) kv_head: KvHead,
    pub(crate) group: usize,
    pub(crate) queries: Range<usize>,
}

impl QueryRows {
    pub(crate) fn len(&self) -> usize {
        self.group * self.queries.len()
    }

    /// The same heads' queries, `size` at a time.
    pub(crate) fn tiles(&self, size: usize) -> impl Iterator<Item = Self> {
        let queries = self.queries.clone();
        let tile = move |first: usize| Self {
            kv_head: self.kv_head,
            group: self.group,
            queries: first..self.queries.end.min(first + size),
        };
        queries.step_by(size).map(tile)
    }

    /// The head of a row, among those of the group.
    pub(crate) fn member(&self, row: usize) -> usize {
        row / self.queries.len()
    }

    /// The head of a row, among the query heads of the sequence.
    pub(crate) fn q_head(&self, row: usize) -> usize {
        self.kv_head.head * self.group + self.member(row)
    }

    pub(crate) fn query(&self, row: usize) -> usize {
        self.queries.start + row % self.queries.len()
    }

    /// The head of a row among those of the group, and its query counted from the start of the chunk.
    pub(crate) fn place_in(&self, chunk: &Self, row: usize) -> (usize, usize) {
        (self.member(row), self.query(row) - chunk.queries.start)
    }

    pub(crate) fn widen<E: Element>(&self, source: &View<'_, E, 4>, target: &mut Buffer) {
        let dim = source.shape[3];
        let target = target.get(self.len() * dim);
        let mut rows = target.chunks_exact_mut(dim);
        let KvHead { batch, head } = self.kv_head;
        for h in head * self.group..(head + 1) * self.group {
            for (i, row) in self.queries.clone().zip(&mut rows) {
                E::widen(source.row(batch, h, i), row);
            }
        }
    }
}

//! Bottom-right alignment: the keys that a query may see.

use flash_dma_problem::{PlanGeometry, Problem};
use std::ops::Range;

#[derive(Clone, Copy)]
pub(crate) struct Positions {
    q_len: usize,
    k_len: usize,
    causal: bool,
}

/// The positions of the first and the last of some queries.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) first: i64,
    pub(crate) last: i64,
}

impl From<&Problem> for Positions {
    fn from(problem: &Problem) -> Self {
        Self {
            q_len: problem.q_len,
            k_len: problem.k_len,
            causal: problem.causal,
        }
    }
}

impl From<&PlanGeometry> for Positions {
    fn from(geometry: &PlanGeometry) -> Self {
        Self {
            q_len: geometry.q_len,
            k_len: geometry.k_len,
            causal: geometry.causal,
        }
    }
}

impl Positions {
    /// The index of the last key that a query may see, negative if it sees none.
    pub(crate) fn of(&self, query: usize) -> i64 {
        if self.causal {
            query as i64 + self.k_len as i64 - self.q_len as i64
        } else {
            self.k_len as i64 - 1
        }
    }

    /// The number of keys that a query may see: those below this index.
    pub(crate) fn visible(&self, query: usize) -> usize {
        (self.of(query) + 1).max(0) as usize
    }

    /// The number of keys that the last of some queries may see, and so all of them together.
    pub(crate) fn visible_to_any(&self, queries: &Range<usize>) -> usize {
        self.visible(queries.end - 1)
    }

    pub(crate) fn span(&self, queries: &Range<usize>) -> Span {
        Span {
            first: self.of(queries.start),
            last: self.of(queries.end - 1),
        }
    }
}

//! The selection of a key, as the interval of positions at which queries attend to it.

/// The positions at which queries attend to one key: `first <= position < end`.
///
/// A query's *position* is the index of the last key it may see ([`Problem::position`](crate::Problem::position)):
/// `i + k_len - q_len` under causal masking, `k_len - 1` otherwise. In these coordinates the selection depends only on
/// the scores and the window, so one set of intervals is valid for causal and full attention and any number of queries.
///
/// Scores do not depend on the query and the visible prefix only grows, so a key's rank only gets worse as the position
/// advances: once evicted it never returns. A key `j` is visible from position `j` on, hence `first = j`; `end` is the
/// position at which the `window`-th better key becomes visible, or `k_len` if that never happens. A key that is never
/// attended to has `end <= first`, and then both are `j`.
///
/// Any other set of one interval per key that begins at the key is a selection, too: recent keys, sinks and documents
/// ([`SelectionRule`](crate::SelectionRule)), and ends that were computed elsewhere. Engines rely on `first = j` and on
/// at most [`Problem::window`](crate::Problem::window) intervals holding any one position; any number may end at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Interval {
    /// First position that attends to the key: the key's own index.
    pub first: u32,
    /// One past the last position that attends to the key.
    pub end: u32,
}

impl Interval {
    /// True if a query at `position` attends to this key. Negative positions see nothing.
    #[must_use]
    pub fn contains(self, position: i64) -> bool {
        i64::from(self.first) <= position && position < i64::from(self.end)
    }

    /// True if no position attends to this key.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.end <= self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_half_open_and_sees_no_negative_position() {
        let i = Interval { first: 2, end: 4 };
        let hits: Vec<i64> = (-3..6).filter(|&p| i.contains(p)).collect();
        assert_eq!(hits, [2, 3]);
        assert!(Interval { first: 3, end: 3 }.is_empty());
    }
}

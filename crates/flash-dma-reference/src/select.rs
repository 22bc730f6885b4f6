//! The keys attended to, by definition.
//!
//! The order of keys: greater score first, a tie (`-0.0` and `0.0` tie) to the lower index, NaN below every number and
//! among themselves by index. A score of −∞ is not in the order at all: its key is never attended to and takes no other
//! key's place.

use core::cmp::Ordering;
use flash_dma_problem::Interval;
use std::collections::BinaryHeap;

/// The order of keys `a` and `b`, both given as score and index: `Less` if `a` comes first.
pub(crate) fn order(a: (f64, usize), b: (f64, usize)) -> Ordering {
    let by_score = match (a.0.is_nan(), b.0.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (false, false) => b.0.partial_cmp(&a.0).expect("neither is NaN"),
    };
    by_score.then(a.1.cmp(&b.1))
}

/// All attendable keys of one head, best first.
#[must_use]
pub fn ranked(scores: &[f64]) -> Vec<usize> {
    let mut keys: Vec<usize> = (0..scores.len())
        .filter(|&j| scores[j] != f64::NEG_INFINITY)
        .collect();
    keys.sort_by(|&a, &b| order((scores[a], a), (scores[b], b)));
    keys
}

/// The keys that a query at `position` attends to, ascending: the first `window`, in order, of those with
/// `j <= position`.
#[must_use]
pub fn selected(scores: &[f64], window: usize, position: i64) -> Vec<usize> {
    take(&ranked(scores), window, position)
}

/// [`selected`], from the keys already [`ranked`].
#[must_use]
pub fn take(ranked: &[usize], window: usize, position: i64) -> Vec<usize> {
    let visible = ranked.iter().copied().filter(|&j| j as i64 <= position);
    let mut keys: Vec<usize> = visible.take(window).collect();
    keys.sort_unstable();
    keys
}

/// The intervals of one head by definition: every position's selected set, collected by key. O(N²).
///
/// # Panics
///
/// If a key's positions are not one run that starts at the key, because intervals could not represent the selection.
#[must_use]
pub fn intervals(scores: &[f64], window: usize) -> Vec<Interval> {
    let ranked = ranked(scores);
    let mut intervals: Vec<Interval> = (0..scores.len() as u32)
        .map(|j| Interval { first: j, end: j })
        .collect();
    for position in 0..scores.len() {
        for key in take(&ranked, window, position as i64) {
            assert_eq!(
                intervals[key].end, position as u32,
                "key {key} returns at position {position}"
            );
            intervals[key].end = position as u32 + 1;
        }
    }
    intervals
}

/// [`intervals`] in O(N log N): walks the positions with the selected keys in a heap and evicts the worst when too
/// many.
///
/// # Panics
///
/// If `window` is 0.
#[must_use]
pub fn intervals_by_heap(scores: &[f64], window: usize) -> Vec<Interval> {
    assert!(window > 0, "a window of no keys");
    let ranked = ranked(scores);
    let mut places = vec![None; scores.len()];
    for (place, &key) in ranked.iter().enumerate() {
        places[key] = Some(place);
    }
    let never = scores.len() as u32;
    let mut live = BinaryHeap::new();
    let mut intervals = Vec::with_capacity(scores.len());
    for (first, place) in (0..never).zip(places) {
        let end = if place.is_some() { never } else { first };
        intervals.push(Interval { first, end });
        live.extend(place);
        if live.len() > window {
            let evicted = live.pop().expect("the heap holds more than the window");
            intervals[ranked[evicted]].end = first;
        }
    }
    intervals
}

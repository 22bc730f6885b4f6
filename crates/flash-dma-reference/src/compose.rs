//! The attended keys under a rule with recent keys, sinks and documents: position by position, by definition.

use crate::select;
use flash_dma_problem::{Interval, SelectionRule};
use std::collections::BTreeSet;

/// The keys that the position attends to, ascending, in a sequence that is one document.
///
/// # Panics
///
/// If the rule has more recent keys than its window has places.
#[must_use]
pub fn attended(scores: &[f64], rule: &SelectionRule, position: usize) -> Vec<usize> {
    let visible = position + 1;
    let border = visible.saturating_sub(rule.recent);
    let (older, recent) = (0..border, border..visible);
    let hidden = |key: usize| scores[key] == f64::NEG_INFINITY;
    // The sinks by index, then the others by rank.
    let sinks = older.clone().filter(|&key| key < rule.sinks);
    let others = select::ranked(&scores[older.clone()]);
    let others = others.into_iter().filter(|&key| key >= rule.sinks);
    let by_rank = sinks.chain(others).filter(|&key| !hidden(key));
    let chosen = by_rank.take(rule.window - rule.recent);
    let kept: BTreeSet<usize> = chosen.chain(recent.filter(|&key| !hidden(key))).collect();
    kept.into_iter().collect()
}

/// The intervals of one head whose documents have these lengths: every position's keys, collected by key. O(N² log N).
///
/// # Panics
///
/// If the lengths do not add up to the keys, or a key's positions are not one run that starts at the key itself,
/// because intervals could then not represent the selection.
#[must_use]
pub fn intervals(scores: &[f64], documents: &[usize], rule: &SelectionRule) -> Vec<Interval> {
    let mut intervals: Vec<Interval> = (0..scores.len() as u32)
        .map(|j| Interval { first: j, end: j })
        .collect();
    for (start, end) in bounds(documents, scores.len()) {
        for position in start..end {
            for key in attended(&scores[start..end], rule, position - start) {
                let interval = &mut intervals[start + key];
                let (key, before) = (start + key, interval.end as usize);
                assert_eq!(before, position, "key {key} returns at position {position}");
                interval.end = position as u32 + 1;
            }
        }
    }
    intervals
}

/// [`intervals`] in O(N log N): within a document, the result of selecting `window - recent` keys by a heap, prolonged
/// by `recent` positions.
///
/// # Panics
///
/// If [`intervals`] does.
#[must_use]
pub fn intervals_by_heap(
    scores: &[f64],
    documents: &[usize],
    rule: &SelectionRule,
) -> Vec<Interval> {
    let mut intervals = Vec::with_capacity(scores.len());
    for (start, end) in bounds(documents, scores.len()) {
        let mut ranks = scores[start..end].to_vec();
        for rank in ranks.iter_mut().take(rule.sinks) {
            if *rank != f64::NEG_INFINITY {
                *rank = f64::INFINITY;
            }
        }
        let ends: Vec<usize> = match rule.ranked() {
            0 => (0..end - start).collect(),
            ranked => (select::intervals_by_heap(&ranks, ranked).iter())
                .map(|i| i.end as usize)
                .collect(),
        };
        for (key, (&rank, of_rank)) in ranks.iter().zip(ends).enumerate() {
            let more = match rank {
                f64::NEG_INFINITY => 0,
                _ => rule.recent,
            };
            intervals.push(Interval {
                first: (start + key) as u32,
                end: end.min(start + of_rank.saturating_add(more)) as u32,
            });
        }
    }
    intervals
}

/// First key and end of each document.
fn bounds(documents: &[usize], len: usize) -> Vec<(usize, usize)> {
    assert_eq!(documents.iter().sum::<usize>(), len, "tokens of documents");
    let mut end = 0;
    let bound = |&tokens: &usize| {
        let start = end;
        end += tokens;
        (start, end)
    };
    documents.iter().map(bound).collect()
}

/// The most keys of one head that are alive at one position.
#[must_use]
pub fn max_live(intervals: &[Interval]) -> usize {
    let last = intervals.iter().map(|i| i.end).max().unwrap_or(0);
    let mut change = vec![0i64; last as usize + 1];
    for interval in intervals.iter().filter(|i| !i.is_empty()) {
        change[interval.first as usize] += 1;
        change[interval.end as usize] -= 1;
    }
    let mut alive = 0;
    let counts = change.into_iter().map(|n| {
        alive += n;
        alive
    });
    counts.max().unwrap_or(0) as usize
}

//! Statistics and views of a selection.

use super::selection::Intervals;
use crate::fallback::running::arange;
use crate::validate::{check_shape, expect, scores_as_f32};
use burn::tensor::{Bool, DType, Int, Tensor, TensorReadError};
use flash_dma_problem::TensorName;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Statistics of a selection, over all sequences and heads.
///
/// A *pair* is a key and a position that attends to it. In every pair the key is recent, a sink, or kept for its
/// rank. Plain and given intervals have no recent keys and no sinks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct IntervalStats {
    /// Number of pairs.
    pub pairs: u64,
    /// Mean number of keys that a position attends to.
    pub mean_alive: f64,
    /// Mean number of positions that attend to a key, over the keys with any.
    pub mean_lifetime: f64,
    /// Share of keys that no position attends to: hidden ones, and those that never make it into the window.
    pub never_alive: f64,
    /// Share of pairs whose key is recent.
    pub recent: f64,
    /// Share of pairs whose key is a sink and no longer recent.
    pub sinks: f64,
}

impl Intervals {
    /// Keys that a position attends to, `[batch, kv_heads, k_len]`. The position of causal query `i` is `i + k_len -
    /// q_len`, that of every other query `k_len - 1`.
    #[must_use]
    pub fn live_at(&self, position: usize) -> Tensor<3, Bool> {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let position = i64::try_from(position).unwrap_or(i64::MAX);
        if position >= k_len as i64 {
            return Tensor::full([batch, heads, k_len], false, &self.tensor().device());
        }
        let [first, end] = self.bounds();
        let live = (first.lower_equal_elem(position)).bool_and(end.greater_elem(position));
        live.reshape([batch, heads, k_len])
    }

    /// Pairs of `q_len` causal queries, `[batch, kv_heads, q_len, k_len]`, true where the query attends to the key,
    /// ready for [`AttentionMask::visible`](crate::AttentionMask::visible). O(q_len · k_len) memory.
    #[must_use]
    pub fn as_mask(&self, q_len: usize) -> Tensor<4, Bool> {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let shape = [batch, heads, q_len, k_len];
        let device = self.tensor().device();
        if shape.contains(&0) {
            return Tensor::empty(shape, &device);
        }
        let (start, end) = (k_len as i64 - q_len as i64, k_len as i64);
        self.visible_at(arange(start..end, (&device, DType::I32)))
    }

    /// Keys that queries at `positions` `[queries]` (i32) attend to, `[batch, kv_heads, queries, k_len]`, none of
    /// them empty.
    pub(crate) fn visible_at(&self, positions: Tensor<1, Int>) -> Tensor<4, Bool> {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let [queries] = positions.dims();
        let shape = [batch, heads, queries, k_len];
        let positions = positions.reshape([1, 1, queries, 1]).expand(shape);
        let [first, end] = self.bounds().map(|keys| keys.swap_dims(2, 3).expand(shape));
        let born = first.lower_equal(positions.clone());
        born.bool_and(end.greater(positions))
    }

    /// Number of positions that attend to each key, `[batch, kv_heads, k_len]` i32.
    #[must_use]
    pub fn lifetimes(&self) -> Tensor<3, Int> {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let [first, end] = self.bounds();
        (end - first).reshape([batch, heads, k_len])
    }

    /// Counts the pairs by kind. Reads the intervals to the host.
    ///
    /// # Panics
    ///
    /// If the device fails to read them.
    #[must_use]
    pub fn stats(&self) -> IntervalStats {
        self.stats_of(&expect(self.read_lifetimes()))
    }

    /// How often an index decides instead of a score: among the positions that leave a key out, the share at which a
    /// key left out has the same score as the lowest kept one. 0 if nothing is left out.
    ///
    /// `scores` `[batch, kv_heads, k_len]` are those of the selection. Counts only keys that compete, over all
    /// sequences and heads: keys of the query's document that are neither recent nor sinks nor hidden (−∞). NaN ties
    /// with NaN. Scores in 16 bits tie often; ties go to the older key, whatever is learned. Reads intervals and
    /// scores to the host.
    ///
    /// # Panics
    ///
    /// If the scores have another shape or another type than f32, f16 and bf16, or reading them fails.
    #[must_use]
    pub fn tie_rate(&self, scores: &Tensor<3>) -> f64 {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let expected = [batch, heads, k_len];
        expect(check_shape(TensorName::Scores, &scores.dims(), &expected));
        let scores = expect(scores_as_f32(scores.clone()));
        let scores = expect(scores.try_into_data_as::<f32>());
        let scores: Vec<f32> = scores.iter::<f32>().collect();
        self.tie_rate_of(&expect(self.read_lifetimes()), &scores)
    }

    pub(crate) fn read_lifetimes(&self) -> Result<Vec<u64>, TensorReadError> {
        let lifetimes = self.lifetimes().try_into_data_as::<i32>()?;
        Ok(lifetimes.iter::<i32>().map(|n| n.max(0) as u64).collect())
    }

    pub(crate) fn stats_of(&self, lifetimes: &[u64]) -> IntervalStats {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let origin = self.origin();
        let (mut pairs, mut live, mut recent, mut of_sinks) = (0u64, 0u64, 0u64, 0u64);
        for (row, head) in lifetimes.chunks(k_len.max(1)).enumerate() {
            let sinks = origin.sinks_of(row / heads.max(1), k_len);
            for (&lifetime, is_sink) in head.iter().zip(sinks) {
                let early = lifetime.min(origin.recent as u64);
                pairs += lifetime;
                live += u64::from(lifetime > 0);
                recent += early;
                of_sinks += if is_sink { lifetime - early } else { 0 };
            }
        }
        let keys = (batch * heads * k_len) as u64;
        IntervalStats {
            pairs,
            mean_alive: share(pairs, keys),
            mean_lifetime: share(pairs, live),
            never_alive: share(keys - live, keys),
            recent: share(recent, pairs),
            sinks: share(of_sinks, pairs),
        }
    }

    pub(crate) fn tie_rate_of(&self, lifetimes: &[u64], scores: &[f32]) -> f64 {
        let [_, heads, k_len, _] = self.tensor().dims();
        let origin = self.origin();
        let (mut ties, mut thresholds) = (0, 0);
        let len = k_len.max(1);
        let rows = lifetimes.chunks(len).zip(scores.chunks(len));
        for (row, (lifetimes, scores)) in rows.enumerate() {
            let sequence = row / heads.max(1);
            let is_sink = origin.sinks_of(sequence, k_len);
            for (start, end) in origin.spans_of(sequence, k_len) {
                let competes = |key: &usize| !is_sink[*key] && scores[*key] != f32::NEG_INFINITY;
                let keys = (start..end).filter(competes).map(|key| Competitor {
                    enters: key.saturating_add(origin.recent),
                    leaves: key + lifetimes[key] as usize,
                    place: place(scores[key]),
                });
                let found = thresholds_of(keys.collect(), start..end);
                ties += found.ties;
                thresholds += found.positions;
            }
        }
        share(ties, thresholds)
    }

    /// First and end, `[batch, kv_heads, k_len, 1]` each.
    fn bounds(&self) -> [Tensor<4, Int>; 2] {
        [0, 1].map(|at| self.tensor().clone().narrow(3, at, 1))
    }
}

struct Competitor {
    /// First position at which its score decides about it.
    enters: usize,
    /// One past the last position that attends to it.
    leaves: usize,
    /// Sort key of its score.
    place: i32,
}

/// Positions that leave a key out, and how many of them have a tie at the threshold.
#[derive(Default)]
struct Thresholds {
    positions: u64,
    ties: u64,
}

/// Walks through the positions of a document. A key that is out never returns, so only the best key left out counts.
fn thresholds_of(keys: Vec<Competitor>, positions: Range<usize>) -> Thresholds {
    let mut leaving: Vec<usize> = (0..keys.len()).collect();
    leaving.sort_unstable_by_key(|&key| keys[key].leaves.max(keys[key].enters));
    let (mut entering, mut leaving) = (keys.iter().peekable(), leaving.into_iter().peekable());
    let mut kept = BinaryHeap::new();
    let mut best_left_out = None;
    let mut found = Thresholds::default();
    for position in positions {
        while let Some(key) = entering.next_if(|key| key.enters <= position) {
            kept.push((Reverse(key.place), key.leaves));
        }
        let is_out = |&key: &usize| keys[key].leaves.max(keys[key].enters) <= position;
        while let Some(key) = leaving.next_if(is_out) {
            best_left_out = best_left_out.max(Some(keys[key].place));
        }
        while kept.peek().is_some_and(|&(_, leaves)| leaves <= position) {
            kept.pop();
        }
        if best_left_out.is_some() {
            let least_kept = kept.peek().map(|&(Reverse(place), _)| place);
            found.positions += 1;
            found.ties += u64::from(least_kept == best_left_out);
        }
    }
    found
}

/// Sort key of a score: NaN first, and zeros of both signs equal.
fn place(score: f32) -> i32 {
    if score.is_nan() {
        return i32::MIN;
    }
    let bits = (score + 0.0).to_bits() as i32;
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

fn share(n: u64, of: u64) -> f64 {
    n as f64 / of.max(1) as f64
}

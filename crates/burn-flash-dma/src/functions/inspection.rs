//! Questions that a selection answers.

use super::selection::Intervals;
use burn::tensor::{Bool, DType, Int, Tensor};

/// What a selection keeps, counted over all sequences and heads.
///
/// A *pair* is a key and a position that attends to it. Every pair is of one kind: the key is recent, or it is a sink, or
/// it has been kept for its rank. Plain and given intervals have no recents and no sinks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct IntervalStats {
    /// Pairs.
    pub pairs: u64,
    /// Keys that a position attends to, in the mean.
    pub mean_alive: f64,
    /// Positions that attend to a key, in the mean over the keys that any attends to.
    pub mean_lifetime: f64,
    /// The share of keys that no position attends to: hidden ones, and those that better keys kept out.
    pub never_alive: f64,
    /// The share of pairs whose key is recent.
    pub recent: f64,
    /// The share of pairs whose key is a sink that is no longer recent.
    pub sinks: f64,
}

impl Intervals {
    /// The keys that a position attends to, `[batch, kv_heads, k_len]`. The position of causal query `i` is
    /// `i + k_len - q_len`, that of every other query `k_len - 1`.
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

    /// The pairs of `q_len` causal queries, `[batch, kv_heads, q_len, k_len]`, true where the query attends to the key:
    /// what [`AttentionMask::visible`](crate::AttentionMask::visible) takes. O(q_len · k_len) memory.
    #[must_use]
    pub fn as_mask(&self, q_len: usize) -> Tensor<4, Bool> {
        let [batch, heads, k_len, _] = self.tensor().dims();
        let shape = [batch, heads, q_len, k_len];
        let device = self.tensor().device();
        if shape.contains(&0) {
            return Tensor::empty(shape, &device);
        }
        let (start, end) = (k_len as i64 - q_len as i64, k_len as i64);
        let positions = Tensor::<1, Int>::arange(start..end, (&device, DType::I32));
        let positions = positions.reshape([1, 1, q_len, 1]).expand(shape);
        let [first, end] = self.bounds().map(|keys| keys.swap_dims(2, 3).expand(shape));
        let born = first.lower_equal(positions.clone());
        born.bool_and(end.greater(positions))
    }

    /// The number of positions that attend to each key, `[batch, kv_heads, k_len]` i32.
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
        let [batch, heads, k_len, _] = self.tensor().dims();
        let lifetimes = self.lifetimes().into_data_as::<i32>();
        let lifetimes: Vec<u64> = lifetimes.iter::<i32>().map(|n| n.max(0) as u64).collect();
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
        let share = |n: u64, of: u64| n as f64 / of.max(1) as f64;
        IntervalStats {
            pairs,
            mean_alive: share(pairs, keys),
            mean_lifetime: share(pairs, live),
            never_alive: share(keys - live, keys),
            recent: share(recent, pairs),
            sinks: share(of_sinks, pairs),
        }
    }

    /// First and end, `[batch, kv_heads, k_len, 1]` each.
    fn bounds(&self) -> [Tensor<4, Int>; 2] {
        [0, 1].map(|at| self.tensor().clone().narrow(3, at, 1))
    }
}

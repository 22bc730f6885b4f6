//! The choice of a sample.

use super::Source;
use crate::Rng;
use crate::select;
use flash_dma_problem::Interval;

/// Up to `count` numbers below `len`, ascending, without repetitions: the first, the last, and a random one from each
/// of equal parts between them.
#[must_use]
pub fn spread(len: usize, count: usize, rng: &mut Rng) -> Vec<usize> {
    if count >= len {
        return (0..len).collect();
    }
    let inner = count.saturating_sub(2);
    let between = (0..inner).map(|n| {
        let (from, to) = (1 + n * (len - 2) / inner, 1 + (n + 1) * (len - 2) / inner);
        from + rng.below(to - from)
    });
    let mut numbers: Vec<usize> = match count {
        0 => Vec::new(),
        1 => vec![len - 1],
        _ => [0, len - 1].into_iter().chain(between).collect(),
    };
    numbers.sort_unstable();
    numbers
}

/// Up to `count` keys of a head, ascending: spread over the keys that are attended to at all, from the shortest
/// interval to the longest, and two that never are (more if too few are attended to).
#[must_use]
pub fn attended_keys(intervals: &[Interval], count: usize, rng: &mut Rng) -> Vec<usize> {
    let length = |j: usize| intervals[j].end - intervals[j].first;
    let (mut attended, never): (Vec<usize>, Vec<usize>) =
        (0..intervals.len()).partition(|&j| length(j) > 0);
    attended.sort_by_key(|&j| length(j));
    let idle = count.saturating_sub(attended.len()).max(2).min(count);
    let never: Vec<usize> = spread(never.len(), idle, rng)
        .into_iter()
        .map(|n| never[n])
        .collect();
    let attended = spread(attended.len(), count - never.len(), rng)
        .into_iter()
        .map(|n| attended[n]);
    let mut keys: Vec<usize> = attended.chain(never).collect();
    keys.sort_unstable();
    keys
}

impl Source<'_> {
    /// Query rows by their numbers, ascending: `per_head` of each of `heads` kv heads, the first and the last among
    /// them, spread over the queries; the query heads of a group alternate.
    #[must_use]
    pub fn choose_rows(&self, heads: usize, per_head: usize, rng: &mut Rng) -> Vec<usize> {
        let p = &self.problem;
        let mut rows = Vec::new();
        for head in spread(p.batch * p.kv_heads, heads, rng) {
            let turn = rng.below(p.group());
            for (n, i) in spread(p.q_len, per_head, rng).into_iter().enumerate() {
                let q_head = head * p.group() + (turn + n) % p.group();
                rows.push(q_head * p.q_len + i);
            }
        }
        rows.sort_unstable();
        rows
    }

    /// The interval of each key of a kv head (counted over the batch), in positions; without scores every key stays.
    ///
    /// # Panics
    ///
    /// If there is no such head.
    #[must_use]
    pub fn intervals(&self, head: usize) -> Vec<Interval> {
        match self.head_scores(head) {
            Some(scores) => select::intervals_by_heap(&scores, self.problem.window),
            None => {
                let end = self.problem.k_len as u32;
                (0..end).map(|first| Interval { first, end }).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_both_ends_and_no_number_twice() {
        let mut rng = Rng::new(1);
        for len in [0, 1, 2, 3, 7, 100] {
            for count in [0, 1, 2, 3, 5, 8, 99, 200] {
                let numbers = spread(len, count, &mut rng);
                assert_eq!(numbers.len(), count.min(len), "{len} {count}");
                assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
                assert!(numbers.iter().all(|&n| n < len));
                if count >= 2 && len >= 2 {
                    assert_eq!((numbers[0], *numbers.last().unwrap()), (0, len - 1));
                }
            }
        }
    }

    #[test]
    fn chosen_keys_cover_short_and_long_intervals_and_the_never_attended() {
        let interval = |first: u32, length: u32| Interval {
            first,
            end: first + length,
        };
        let intervals: Vec<Interval> = (0..100).map(|j| interval(j, j % 4 * 7)).collect();
        let keys = attended_keys(&intervals, 10, &mut Rng::new(2));
        assert_eq!(keys.len(), 10);
        for length in 0..4 {
            assert!(keys.iter().any(|j| j % 4 == length), "{keys:?}");
        }
        let all_live = vec![interval(0, 5); 6];
        assert_eq!(attended_keys(&all_live, 4, &mut Rng::new(3)).len(), 4);
    }
}

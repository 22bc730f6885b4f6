//! The selections of a problem with scores: intervals by definition.

use super::spec::{By, Ends, Parts, Spec, What};
use flash_dma_problem::{Interval, SelectionRule};
use flash_dma_reference::{Rng, compose};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selected {
    /// `[batch, kv_heads, k_len]`.
    pub(super) intervals: Vec<Interval>,
    /// One past the last position at which each key is a runner-up, if ranks learn; without runners-up the end.
    pub(super) far: Option<Vec<u32>>,
    /// The first position at which each key is kept for its rank, if kept keys learn or ranks compete.
    pub(super) from: Option<Vec<u32>>,
}

impl Selected {
    /// The shares of keys whose ranks compete: a key's part of all positions of its head at which a rank counts.
    pub(super) fn shares(&self, k_len: usize) -> Vec<f64> {
        let both = self.far.as_ref().zip(self.from.as_ref());
        let (far, from) = both.expect("ranks learn");
        let positions = (far.iter().zip(from)).map(|(far, from)| far.saturating_sub(*from));
        let positions: Vec<f64> = positions.map(f64::from).collect();
        let of_head = |positions: &[f64]| {
            let all: f64 = positions.iter().sum();
            let share = |&of_key: &f64| if of_key > 0.0 { of_key / all } else { 0.0 };
            positions.iter().map(share).collect::<Vec<_>>()
        };
        positions.chunks(k_len).flat_map(of_head).collect()
    }
}

impl Spec {
    /// The window, all keys if there is none.
    fn kept(&self) -> usize {
        self.window().unwrap_or(self.k_len).max(1)
    }

    /// The rule of each key/value head; parts that do not fit into the window are cut.
    pub(super) fn rules(&self, parts: &Parts) -> Vec<SelectionRule> {
        let recent = parts.recent.min(self.kept());
        let sinks = parts.sinks.min(self.kept() - recent);
        let rule = |head: usize| SelectionRule {
            window: (self.kept().saturating_sub(head * parts.narrower))
                .max((recent + sinks).max(1)),
            recent,
            sinks,
        };
        (0..self.kv_heads).map(rule).collect()
    }

    /// The lengths of a sequence's documents: some of about the given length, some of a part of it, some of a few
    /// tokens.
    pub(super) fn documents(&self, parts: &Parts) -> Vec<usize> {
        let Some(length) = parts.documents else {
            return vec![self.k_len];
        };
        let (length, mut left) = (length.max(1), self.k_len);
        let turns = [length, length / 3 + 1, 2 * length + 1, 1, length + 7];
        let cut = |of: &usize| {
            let length = (*of).min(left);
            left -= length;
            (length > 0).then_some(length)
        };
        turns.iter().cycle().map_while(cut).collect()
    }

    /// The intervals of keys ranked by `rank`, `[batch, kv_heads, k_len]`.
    pub(super) fn selected(&self, rank: &[f64]) -> Selected {
        let What::Scored { selecting, .. } = &self.what else {
            panic!("{self} has no scores");
        };
        let none = selecting.left_out.then_some(0);
        let runners_up = selecting.runners_up.or(none);
        let reads_from = selecting.left_out || selecting.competes;
        let from = reads_from.then(|| self.kept_by_rank_from());
        let heads = || rank.chunks_exact(self.k_len.max(1)).enumerate();
        match &selecting.by {
            By::Rank(parts) => {
                let (rules, documents) = (self.rules(parts), self.documents(parts));
                let of = |more: usize| -> Vec<Interval> {
                    let head = |(head, rank): (usize, &[f64])| {
                        let rule = rules[head % self.kv_heads].widened(more);
                        exact_head(rank, &documents, &rule)
                    };
                    heads().flat_map(head).collect()
                };
                let far = |more| of(more).iter().map(|interval| interval.end).collect();
                Selected {
                    intervals: of(0),
                    far: runners_up.map(far),
                    from,
                }
            }
            By::Ends(ends) => {
                let mut rng = Rng::new(self.seed ^ 0x656e_6473);
                let mut intervals: Vec<Interval> = (0..self.batch * self.kv_heads)
                    .flat_map(|_| self.ends(*ends, &mut rng))
                    .collect();
                // A key whose score is −∞ is neither attended to nor a runner-up.
                let hidden = |n: usize| rank[n] == f64::NEG_INFINITY;
                for (n, interval) in intervals.iter_mut().enumerate() {
                    if hidden(n) {
                        interval.end = interval.first;
                    }
                }
                let later = |(n, interval): (usize, &Interval), more: usize| {
                    let more = if hidden(n) { 0 } else { more };
                    (interval.end as usize + more).min(self.k_len) as u32
                };
                let ends = || intervals.iter().enumerate();
                let far = |more: usize| ends().map(|end| later(end, more)).collect();
                Selected {
                    far: runners_up.map(far),
                    intervals,
                    from,
                }
            }
        }
    }

    /// The first position at which each key is kept for its rank: not while it is recent, and none for a sink. Ends
    /// that are independent of ranks have some of each.
    fn kept_by_rank_from(&self) -> Vec<u32> {
        let What::Scored { selecting, .. } = &self.what else {
            panic!("{self} has no scores");
        };
        let head: Vec<usize> = match &selecting.by {
            By::Rank(parts) => {
                let rule = self.rules(parts)[0];
                let of_document = |len: usize| 0..len;
                let places = self.documents(parts).into_iter().flat_map(of_document);
                let from = |(key, place): (usize, usize)| match place < rule.sinks {
                    true => self.k_len,
                    false => key + rule.recent.min(self.k_len),
                };
                places.enumerate().map(from).collect()
            }
            By::Ends(_) => (0..self.k_len)
                .map(|key| match key % 7 {
                    0..=3 => key,
                    4 | 5 => key + 9,
                    _ => self.k_len,
                })
                .collect(),
        };
        let heads = (0..self.batch * self.kv_heads).flat_map(|_| &head);
        heads.map(|&from| from as u32).collect()
    }

    fn ends(&self, ends: Ends, rng: &mut Rng) -> Vec<Interval> {
        let kept = self.kept().min(self.k_len.max(1));
        let end = |key: usize| match ends {
            // One of eight keys is never attended to.
            Ends::Random if rng.below(8) == 0 => key,
            Ends::Random => key + rng.below(2 * kept) + 1,
            Ends::Waves => (key / kept + 1) * kept + key % 2,
        };
        let ends: Vec<usize> = (0..self.k_len).map(end).collect();
        let interval = |(key, end): (usize, usize)| Interval {
            first: key as u32,
            end: end.min(self.k_len) as u32,
        };
        ends.into_iter().enumerate().map(interval).collect()
    }
}

/// The intervals of a head by definition; for many keys by a heap, as the definition takes quadratic time.
fn exact_head(rank: &[f64], documents: &[usize], rule: &SelectionRule) -> Vec<Interval> {
    match rank.len() {
        0..=64 => compose::intervals(rank, documents, rule),
        _ => compose::intervals_by_heap(rank, documents, rule),
    }
}

/// The most keys of a head that are attended to at one position.
pub(super) fn most_live(spec: &Spec, intervals: &[Interval]) -> usize {
    let heads = intervals.chunks_exact(spec.k_len.max(1));
    heads.map(compose::max_live).max().unwrap_or(0)
}

//! Appending to the slots of one head: which tokens enter, which keys are evicted, and when.

use crate::select::{interval_of, quality};
use flash_dma_problem::{Interval, SelectionRule};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The position of a slot that holds no key.
pub(crate) const EMPTY: i32 = -1;

/// In the result of [`place`]: the slot keeps its key.
const KEEP: u32 = u32::MAX;

/// The keys that the slots of one head hold before an append.
#[derive(Clone, Copy)]
pub(crate) struct HeldKeys<'a> {
    /// `[window]`: −∞ for a slot whose key, if it has one, is not attended to.
    pub(crate) scores: &'a [f32],
    /// `[window]`: [`EMPTY`] in an empty slot.
    pub(crate) positions: &'a [i32],
}

/// Takes tokens in one by one. `tokens` are the scores of the new tokens, whose first is at `position` of its sequence.
///
/// Writes to `placed`, `[window]`, the new token that each slot holds in the end, or [`KEEP`]; and to `intervals`,
/// `[window + tokens]`, the times at which each slot's old key and each new token is attended to. Position `window + i`
/// is that of token `i`: the coordinates of a sequence of the old keys, slot by slot, and then the tokens.
///
/// O(window) for one token; for many O(window), and O(log window) per token; with recent keys also O(recent log
/// recent).
pub(crate) fn place(
    rule: SelectionRule,
    held: HeldKeys<'_>,
    tokens: &[f32],
    position: usize,
    placed: &mut [u32],
    intervals: &mut [Interval],
) {
    let HeldKeys { scores, positions } = held;
    let window = scores.len();
    let end = window + tokens.len();
    placed.fill(KEEP);
    for (slot, interval) in intervals[..window].iter_mut().enumerate() {
        let shown = positions[slot] != EMPTY && scores[slot] != f32::NEG_INFINITY;
        *interval = interval_of(slot, if shown { end } else { slot });
    }
    let mut contest = Contest::new(rule, held, tokens.len(), position);
    for (j, &score) in tokens.iter().enumerate() {
        let key = window + j;
        intervals[key] = interval_of(key, key);
        let Some(slot) = contest.insert(score, position + j) else {
            continue;
        };
        let evicted = match placed[slot] {
            KEEP => slot,
            token => window + token as usize,
        };
        if !intervals[evicted].is_empty() {
            intervals[evicted].end = key as u32;
        }
        if score != f32::NEG_INFINITY {
            intervals[key].end = end as u32;
        }
        placed[slot] = j as u32;
    }
}

/// The slots whose key changes according to [`place`], each with the token it gets.
pub(crate) fn changes(placed: &[u32]) -> impl Iterator<Item = (usize, usize)> {
    (placed.iter().enumerate())
        .filter(|&(_, &token)| token != KEEP)
        .map(|(slot, &token)| (slot, token as usize))
}

/// The worth of an empty slot and of a hidden key: less than any key that can be attended to.
const NOTHING: u64 = 0;

/// The worth of a key that no other one can evict.
const PROTECTED: u64 = u64::MAX;

/// The worth of a key to a sequence whose last token is at `now`: the key of least worth goes first.
fn worth(rule: SelectionRule, score: f32, position: usize, now: usize) -> u64 {
    let hidden = score == f32::NEG_INFINITY;
    if rule.is_recent(position, now) || (position < rule.sinks && !hidden) {
        return PROTECTED;
    }
    if hidden {
        return NOTHING;
    }
    quality(score, position)
}

struct Contest {
    rule: SelectionRule,
    slots: Slots,
}

/// The slots, by the worth of their keys.
enum Slots {
    /// For a single token, a search: the least worth, and its slot.
    Search(u64, usize),
    /// For many: the slots whose keys are not protected, the least worth on top; and those with recent keys in order of
    /// position. A visible sink that is no longer recent is in neither: it stays.
    Heap {
        open: BinaryHeap<Reverse<(u64, usize)>>,
        recent: VecDeque<Recent>,
    },
}

struct Recent {
    position: usize,
    score: f32,
    slot: usize,
}

impl Contest {
    /// `now` is the position of the first of the `tokens`.
    fn new(
        rule: SelectionRule,
        HeldKeys { scores, positions }: HeldKeys<'_>,
        tokens: usize,
        now: usize,
    ) -> Self {
        let of_slot = |slot: usize| match positions[slot] {
            EMPTY => NOTHING,
            position => worth(rule, scores[slot], position as usize, now),
        };
        let worths = (0..scores.len()).map(|slot| (of_slot(slot), slot));
        if tokens <= 1 {
            let (worth, slot) = worths.min().unwrap_or((PROTECTED, 0));
            let slots = Slots::Search(worth, slot);
            return Self { rule, slots };
        }
        let open = worths.filter(|&(worth, _)| worth != PROTECTED);
        let is_recent = |&slot: &usize| {
            positions[slot] != EMPTY && rule.is_recent(positions[slot] as usize, now)
        };
        let recent = (0..scores.len()).filter(is_recent).map(|slot| Recent {
            position: positions[slot] as usize,
            score: scores[slot],
            slot,
        });
        let mut recent: Vec<Recent> = recent.collect();
        recent.sort_by_key(|key| key.position);
        let slots = Slots::Heap {
            open: open.map(Reverse).collect(),
            recent: recent.into(),
        };
        Self { rule, slots }
    }

    /// The slot that the token of position `now` gets, if any: that of the least worth, if the token is worth more.
    fn insert(&mut self, score: f32, now: usize) -> Option<usize> {
        let rule = self.rule;
        let own = worth(rule, score, now, now);
        match &mut self.slots {
            Slots::Search(least, slot) => (*least < own).then_some(*slot),
            Slots::Heap { open, recent } => {
                while let Some(key) = recent.pop_front_if(|key| !rule.is_recent(key.position, now))
                {
                    let worth = worth(rule, key.score, key.position, now);
                    if worth != PROTECTED {
                        open.push(Reverse((worth, key.slot)));
                    }
                }
                let Reverse((least, slot)) = *open.peek()?;
                if least >= own {
                    return None;
                }
                open.pop();
                if rule.recent > 0 {
                    recent.push_back(Recent {
                        position: now,
                        score,
                        slot,
                    });
                } else if own != PROTECTED {
                    open.push(Reverse((own, slot)));
                }
                Some(slot)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_reference::compose::attended as expected_keys;
    use flash_dma_reference::{Rng, generate::Scores};

    fn sorted(keys: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut keys: Vec<usize> = keys.collect();
        keys.sort_unstable();
        keys
    }

    /// However a sequence is split, the slots hold the keys of the rule, and the intervals the keys of an append's
    /// tokens.
    #[test]
    fn slots_hold_what_is_selected_after_every_append() {
        let mut rng = Rng::new(3);
        for case in 0..600 {
            let kind = Scores::ALL[case % Scores::ALL.len()];
            let len = 1 + rng.below(90);
            let mut rule = SelectionRule::top(1 + rng.below(30));
            if case % 3 > 0 {
                rule.recent = rng.below(rule.window + 1);
                rule.sinks = rng.below(rule.window - rule.recent + 1);
            }
            let most = [1, 7, 40][rng.below(3)];
            let window = rule.window;
            let head = kind.head(len, &mut rng);
            let (mut scores, mut positions) = (vec![f32::NAN; window], vec![EMPTY; window]);
            let mut done = 0;
            while done < len {
                let n = (1 + rng.below(most)).min(len - done);
                let tokens: Vec<f32> = head[done..done + n].iter().map(|&z| z as f32).collect();
                let before = positions.clone();
                let mut placed = vec![7; window];
                let mut intervals = vec![Interval { first: 9, end: 9 }; window + n];
                let held = HeldKeys {
                    scores: &scores,
                    positions: &positions,
                };
                place(rule, held, &tokens, done, &mut placed, &mut intervals);
                for (slot, token) in changes(&placed) {
                    scores[slot] = tokens[token];
                    positions[slot] = (done + token) as i32;
                }
                for i in 0..n {
                    let attends = |&key: &usize| intervals[key].contains((window + i) as i64);
                    let position = |key: usize| match key.checked_sub(window) {
                        Some(token) => done + token,
                        None => before[key] as usize,
                    };
                    let attended = sorted((0..window + n).filter(attends).map(position));
                    let now = done + i;
                    let expected = expected_keys(&head, &rule, now);
                    assert_eq!(attended, expected, "{kind:?} {rule:?} position {now}");
                }
                done += n;
                let is_live =
                    |&slot: &usize| positions[slot] != EMPTY && scores[slot] != f32::NEG_INFINITY;
                let live = (0..window)
                    .filter(is_live)
                    .map(|slot| positions[slot] as usize);
                let expected = expected_keys(&head, &rule, done - 1);
                assert_eq!(sorted(live), expected, "{kind:?} {rule:?}");
            }
        }
    }
}

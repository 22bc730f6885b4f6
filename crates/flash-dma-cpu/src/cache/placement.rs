//! Appending to the slots of one head: which tokens enter, which keys are evicted, and when.

use crate::select::quality;
use flash_dma_problem::Interval;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The position of a slot that holds no key.
pub(crate) const EMPTY: i32 = -1;

/// In [`Placement::token`]: the slot keeps what it holds.
const KEEP: u32 = u32::MAX;

/// The keys that the slots of one head hold before an append.
#[derive(Clone, Copy)]
pub(crate) struct HeldKeys<'a> {
    /// `[window]`.
    pub(crate) scores: &'a [f32],
    /// `[window]`: [`EMPTY`] in an empty slot.
    pub(crate) positions: &'a [i32],
}

/// The outcome of an append for one head.
pub(crate) struct Placement<'a> {
    /// `[window]`: the new token that each slot holds in the end, or [`KEEP`].
    pub(crate) token: &'a mut [u32],
    /// `[window + tokens]`: when each slot's old key and each new token is attended. Position
    /// `window + i` is that of token `i`: the coordinates of a sequence of the old keys, slot by slot,
    /// and the tokens behind them.
    pub(crate) intervals: &'a mut [Interval],
}

impl Placement<'_> {
    /// Takes the tokens in one by one. `tokens` are the scores of the new tokens, whose first is at `position` of its
    /// sequence.
    ///
    /// O(window) for one token; for many O(window), and O(log window) per token.
    pub(crate) fn make(&mut self, held: HeldKeys<'_>, tokens: &[f32], position: usize) {
        let HeldKeys { scores, positions } = held;
        let window = scores.len();
        let end = (window + tokens.len()) as u32;
        self.token.fill(KEEP);
        for (slot, interval) in self.intervals[..window].iter_mut().enumerate() {
            let occupied = positions[slot] != EMPTY;
            *interval = interval_of(slot, if occupied { end } else { slot as u32 });
        }
        let mut qualities = Qualities::new(held, tokens.len());
        for (j, &score) in tokens.iter().enumerate() {
            let key = window + j;
            self.intervals[key] = interval_of(key, key as u32);
            if score == f32::NEG_INFINITY {
                continue;
            }
            let Some(slot) = qualities.insert(quality(score, position + j)) else {
                continue;
            };
            let evicted = match self.token[slot] {
                KEEP => slot,
                token => window + token as usize,
            };
            if !self.intervals[evicted].is_empty() {
                self.intervals[evicted].end = key as u32;
            }
            self.intervals[key].end = end;
            self.token[slot] = j as u32;
        }
    }
}

/// The slots whose key changes by a [`Placement::token`], each with the token it gets.
pub(crate) fn changes(token: &[u32]) -> impl Iterator<Item = (usize, usize)> {
    (token.iter().enumerate())
        .filter(|&(_, &token)| token != KEEP)
        .map(|(slot, &token)| (slot, token as usize))
}

/// The qualities of the keys in the slots.
enum Qualities {
    /// For a single token: nothing but a search.
    Search {
        empty: Option<usize>,
        worst: (u64, usize),
    },
    /// For many: the empty slots, the last first, and the occupied ones with the worst key on top.
    Heap {
        empty: Vec<usize>,
        occupied: BinaryHeap<Reverse<(u64, usize)>>,
    },
}

impl Qualities {
    fn new(HeldKeys { scores, positions }: HeldKeys<'_>, tokens: usize) -> Self {
        let quality = |slot: usize| quality(scores[slot], positions[slot] as usize);
        let slots = 0..scores.len();
        if tokens <= 1 {
            let empty = slots.clone().find(|&slot| positions[slot] == EMPTY);
            let worst = match empty {
                Some(_) => (0, 0),
                None => slots
                    .map(|slot| (quality(slot), slot))
                    .min()
                    .unwrap_or((0, 0)),
            };
            return Self::Search { empty, worst };
        }
        let (mut empty, mut occupied) = (Vec::new(), Vec::with_capacity(scores.len()));
        for slot in slots.rev() {
            if positions[slot] == EMPTY {
                empty.push(slot);
            } else {
                occupied.push(Reverse((quality(slot), slot)));
            }
        }
        Self::Heap {
            empty,
            occupied: occupied.into(),
        }
    }

    /// The slot that a key of this quality gets: an empty one, else that of the worst key if the new one
    /// is better.
    fn insert(&mut self, quality: u64) -> Option<usize> {
        match self {
            Self::Search { empty, worst } => {
                empty.or_else(|| (worst.0 < quality).then_some(worst.1))
            }
            Self::Heap { empty, occupied } => {
                if let Some(slot) = empty.pop() {
                    occupied.push(Reverse((quality, slot)));
                    return Some(slot);
                }
                let mut worst = occupied.peek_mut()?;
                if worst.0.0 >= quality {
                    return None;
                }
                let slot = worst.0.1;
                *worst = Reverse((quality, slot));
                Some(slot)
            }
        }
    }
}

fn interval_of(key: usize, end: u32) -> Interval {
    Interval {
        first: key as u32,
        end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_reference::select::selected;
    use flash_dma_reference::{Rng, generate::Scores};

    /// After any split of a sequence into appends the slots hold the selected keys, and the intervals
    /// of each append are the selections of its tokens.
    #[test]
    fn slots_hold_what_is_selected_after_every_append() {
        let mut rng = Rng::new(3);
        for case in 0..200 {
            let kind = Scores::ALL[case % Scores::ALL.len()];
            let len = 1 + rng.below(90);
            let window = 1 + rng.below(30);
            let head = kind.head(len, &mut rng);
            let (mut scores, mut positions) = (vec![f32::NAN; window], vec![EMPTY; window]);
            let mut done = 0;
            while done < len {
                let n = (1 + rng.below(7)).min(len - done);
                let tokens: Vec<f32> = head[done..done + n].iter().map(|&z| z as f32).collect();
                let before = positions.clone();
                let mut token = vec![7; window];
                let mut intervals = vec![Interval { first: 9, end: 9 }; window + n];
                let mut placement = Placement {
                    token: &mut token,
                    intervals: &mut intervals,
                };
                let held = HeldKeys {
                    scores: &scores,
                    positions: &positions,
                };
                placement.make(held, &tokens, done);
                for (slot, token) in changes(&token) {
                    scores[slot] = tokens[token];
                    positions[slot] = (done + token) as i32;
                }
                for i in 0..n {
                    let mut attended: Vec<usize> = (0..window + n)
                        .filter(|&key| intervals[key].contains((window + i) as i64))
                        .map(|key| match key.checked_sub(window) {
                            Some(token) => done + token,
                            None => before[key] as usize,
                        })
                        .collect();
                    attended.sort_unstable();
                    let expected = selected(&head, window, (done + i) as i64);
                    assert_eq!(
                        attended,
                        expected,
                        "{kind:?} window {window} position {}",
                        done + i
                    );
                }
                done += n;
                let mut live: Vec<usize> = (positions.iter().filter(|&&p| p != EMPTY))
                    .map(|&p| p as usize)
                    .collect();
                live.sort_unstable();
                assert_eq!(live, selected(&head, window, done as i64 - 1), "{kind:?}");
            }
        }
    }
}

//! A cache of slots for one head, token by token: which keys enter and which leave.

use crate::select;
use core::cmp::Ordering;
use flash_dma_problem::SelectionRule;

#[derive(Clone, Copy, Debug)]
struct Held {
    position: usize,
    score: f64,
}

impl Held {
    /// True if the key is never attended to.
    fn is_hidden(&self) -> bool {
        self.score == f64::NEG_INFINITY
    }
}

/// Slots, as many as the window of a rule, and the keys in them.
///
/// They are enough to compute [`attended`](crate::compose::attended), which sees everything, for the last position.
#[derive(Clone, Debug)]
pub struct SlotCache {
    rule: SelectionRule,
    slots: Vec<Option<Held>>,
    seen: usize,
}

impl SlotCache {
    /// Empty slots.
    #[must_use]
    pub fn new(rule: SelectionRule) -> Self {
        Self {
            rule,
            slots: vec![None; rule.window],
            seen: 0,
        }
    }

    /// Takes in the next token of the sequence.
    ///
    /// With recent keys it always takes a slot, even if it is hidden, because it takes its place among them. The slot
    /// is the worst of those whose keys are not protected: an empty one, otherwise that of a hidden key, otherwise that
    /// of the key which ranks last. Without recent keys the token takes that slot only if it ranks before its key.
    ///
    /// # Panics
    ///
    /// If every slot is protected, which a checked rule rules out.
    pub fn push(&mut self, score: f64) {
        let new = Held {
            position: self.seen,
            score,
        };
        self.seen += 1;
        if self.rule.recent == 0 && new.is_hidden() {
            return;
        }
        let free = (0..self.slots.len()).filter(|&slot| !self.is_protected(slot));
        let worst = free.min_by(|&a, &b| worse_first(self.slots[a], self.slots[b]));
        match worst {
            Some(slot) => {
                let takes = self.rule.recent > 0
                    || worse_first(self.slots[slot], Some(new)) == Ordering::Less;
                if takes {
                    self.slots[slot] = Some(new);
                }
            }
            None => assert_eq!(self.rule.recent, 0, "{:?} protects every slot", self.rule),
        }
    }

    /// True if a slot holds a key whose place the last token cannot take: a recent one, or a visible sink.
    fn is_protected(&self, slot: usize) -> bool {
        self.slots[slot].is_some_and(|held| {
            let is_recent = held.position + self.rule.recent >= self.seen;
            is_recent || (held.position < self.rule.sinks && !held.is_hidden())
        })
    }

    /// The positions of the keys that the last token attends to, ascending.
    #[must_use]
    pub fn attended(&self) -> Vec<usize> {
        let shown = |&(_, score): &(usize, f64)| score != f64::NEG_INFINITY;
        let keys = self.keys().into_iter().filter(shown);
        keys.map(|(position, _)| position).collect()
    }

    /// The keys in order of position, as position and score, hidden ones included.
    #[must_use]
    pub fn keys(&self) -> Vec<(usize, f64)> {
        let mut keys: Vec<(usize, f64)> = (self.slots.iter().flatten())
            .map(|held| (held.position, held.score))
            .collect();
        keys.sort_by_key(|&(position, _)| position);
        keys
    }
}

/// Empty slots, then hidden keys, then the others from the last in rank on.
fn worse_first(a: Option<Held>, b: Option<Held>) -> Ordering {
    let worth = |held: Option<Held>| held.map(|held| !held.is_hidden());
    let by_worth = worth(a).cmp(&worth(b));
    by_worth.then_with(|| match (a, b) {
        (Some(a), Some(b)) if !a.is_hidden() => {
            select::order((b.score, b.position), (a.score, a.position))
        }
        _ => Ordering::Equal,
    })
}

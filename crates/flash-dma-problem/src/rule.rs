//! The rule by which a head selects its keys.

use crate::AttentionError;

/// The rule by which a position selects among the keys it may see: its last `recent` keys, and the `window − recent`
/// best of the older ones, among which the first `sinks` keys rank above all others.
///
/// Recency goes by position: a hidden key (a score of −∞) is not attended to but still takes its place among the recent
/// ones. A hidden sink stays hidden. With documents, all of this applies to the keys of the position's document.
///
/// A key `j` competes from position `j + recent` on. So if selecting `window − recent` keys gives it the interval
/// `[j, e)`, its interval under the rule is `[j, e + recent)`, clipped to the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SelectionRule {
    /// Number of keys that a position keeps, including recent keys and sinks.
    pub window: usize,
    /// How many of the last keys are kept whatever their scores.
    pub recent: usize,
    /// How many of the first keys rank above all others.
    pub sinks: usize,
}

/// The role of the keys' scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ScoreRole {
    /// They rank the keys, and each is added to its key's logits.
    #[default]
    RankAndBias,
    /// They rank the keys, and nothing is added to the logits. A key of score −∞ stays hidden.
    Rank,
}

/// How many keys a position keeps by recency and by rank: its last `recent` keys, and the `best` of the older ones.
///
/// A key whose rank keeps it until position `e` (its own position if it is never kept for its rank) is kept until
/// `e + recent`; a hidden key never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeptKeys {
    /// Number of keys kept for their rank.
    pub best: usize,
    /// How many of the last keys are kept whatever their ranks.
    pub recent: usize,
}

impl From<usize> for KeptKeys {
    fn from(best: usize) -> Self {
        Self { best, recent: 0 }
    }
}

impl KeptKeys {
    /// Checks that at least one key is kept.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`].
    pub fn check(&self) -> Result<(), AttentionError> {
        match self {
            Self { best: 0, recent: 0 } => Err(AttentionError::ZeroWindow),
            _ => Ok(()),
        }
    }

    /// The end of the interval of a key that its rank keeps until `end`, among `k_len` keys.
    #[must_use]
    pub fn until(&self, end: usize, k_len: usize) -> usize {
        end.saturating_add(self.recent).min(k_len)
    }
}

impl From<usize> for SelectionRule {
    fn from(window: usize) -> Self {
        Self::top(window)
    }
}

impl From<KeptKeys> for SelectionRule {
    /// The rule that keeps these keys, without sinks.
    fn from(kept: KeptKeys) -> Self {
        Self {
            window: kept.best.saturating_add(kept.recent),
            recent: kept.recent,
            sinks: 0,
        }
    }
}

impl SelectionRule {
    /// The rule that keeps the `window` best keys.
    #[must_use]
    pub fn top(window: usize) -> Self {
        Self {
            window,
            recent: 0,
            sinks: 0,
        }
    }

    /// Checks that the window has room for recent keys and sinks.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`] or [`AttentionError::WindowParts`].
    pub fn check(&self) -> Result<(), AttentionError> {
        let Self {
            window,
            recent,
            sinks,
        } = *self;
        if window == 0 {
            return Err(AttentionError::ZeroWindow);
        }
        if recent.saturating_add(sinks) > window {
            return Err(AttentionError::WindowParts {
                recent,
                sinks,
                window,
            });
        }
        Ok(())
    }

    /// Number of keys kept by rank: all except the recent ones.
    #[must_use]
    pub fn ranked(&self) -> usize {
        self.window - self.recent
    }

    /// The keys an engine selects under this rule once the sinks have scores that rank them first.
    #[must_use]
    pub fn kept(&self) -> KeptKeys {
        KeptKeys {
            best: self.ranked(),
            recent: self.recent,
        }
    }

    /// True if the key at `position` is one of the last keys that position `now` sees; `position <= now`.
    #[must_use]
    pub fn is_recent(&self, position: usize, now: usize) -> bool {
        now.saturating_sub(position) < self.recent
    }

    /// The same rule with `more` additional keys by rank.
    #[must_use]
    pub fn widened(mut self, more: usize) -> Self {
        self.window = self.window.saturating_add(more);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_keys_and_sinks_fit_into_the_window() {
        let rule = |window, recent, sinks| SelectionRule {
            window,
            recent,
            sinks,
        };
        assert_eq!(rule(5, 2, 3).check(), Ok(()));
        assert_eq!(rule(5, 5, 0).check(), Ok(()));
        assert_eq!(rule(0, 0, 0).check(), Err(AttentionError::ZeroWindow));
        let text = |rule: SelectionRule| rule.check().unwrap_err().to_string();
        let parts = "2 recent keys and 4 sinks pass the window of 5 keys";
        assert_eq!(text(rule(5, 2, 4)), parts);
        assert!(rule(5, 6, 0).check().is_err());
        assert!(rule(5, usize::MAX, 1).check().is_err());
        assert_eq!(rule(5, 2, 3).widened(usize::MAX).window, usize::MAX);
        assert_eq!(rule(5, 2, 3).kept(), KeptKeys { best: 3, recent: 2 });
        assert_eq!(SelectionRule::from(rule(5, 2, 0).kept()), rule(5, 2, 0));
        assert_eq!(rule(5, 2, 3).kept().check(), Ok(()));
        assert_eq!(rule(5, 5, 0).kept().check(), Ok(()));
        assert_eq!(KeptKeys::from(0).check(), Err(AttentionError::ZeroWindow));
        assert_eq!(rule(5, 2, 3).kept().until(7, 10), 9);
        assert_eq!(rule(usize::MAX, usize::MAX, 0).kept().until(7, 10), 10);
    }
}

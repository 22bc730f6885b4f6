//! Arms: methods of selecting keys, ours and the controls.

use burn_flash_dma::nn;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Selects the keys that a query attends to, `w` per query and kv head.
///
/// Every arm has the same parameters, initial values and data; a control that adds no scores leaves their parameters
/// unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// All keys, and nothing added to their logits.
    Dense,
    /// The default layer, except for the options: linear scores that only rank the keys, a quarter of the window
    /// recent.
    Ours,
    /// Ours without recent keys: the whole window by score.
    NoRecent,
    /// Ours, but the scores are added to the logits as well.
    Added,
    /// [`Added`](Self::Added) without runners-up: a key outside the window learns nothing.
    AddedNoRunnersUp,
    /// [`Added`](Self::Added) without recent keys.
    AddedNoRecent,
    /// [`Added`](Self::Added) with the paper's score form: DMA's own, with recent keys and runners-up.
    AddedZoh,
    /// Scores are learned and added to the logits of all keys; nothing is pruned.
    Unpruned,
    /// [`Added`](Self::Added), but a score `z` adds only `4 tanh(z / 4)` to the logits: it ranks as it is, and cannot
    /// outweigh them. Recall only.
    Bounded,
    /// Ours with scores that stay a random projection of the tokens: they only rank the keys, and no gradient passes
    /// through them.
    Frozen,
    /// The first `w` keys. Recall only.
    First,
    /// The last `w` keys.
    Sliding,
    /// StreamingLLM: the first 4 keys (a quarter of windows below 16), and the last ones up to `w`. Recall only.
    Sinks,
    /// CoWA: positional windows of different lengths per kv head, as many keys in total. Half of the heads see the
    /// last `w / 4` keys, the others the last `2 w − w / 4`. Recall only.
    HeadWindows,
    /// The keys that will be asked for: see [`oracle`](crate::recall::keys::oracle). Recall only.
    Oracle,
}

/// Scores of an arm's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The layer's own, which rank the keys and are added to the logits.
    RankAndBias,
    /// The layer's own, which rank the keys and are added to the logits within bounds.
    RankAndBounded,
    /// The layer's own, which only rank the keys.
    Rank,
    /// The layer's own at their initial values, which only rank the keys.
    FrozenRank,
    /// No scores.
    None,
}

impl Arm {
    /// Scores of its layers.
    pub fn scores(self) -> Scores {
        match self {
            Self::Ours | Self::NoRecent => Scores::Rank,
            Self::Added
            | Self::AddedNoRunnersUp
            | Self::AddedNoRecent
            | Self::AddedZoh
            | Self::Unpruned => Scores::RankAndBias,
            Self::Bounded => Scores::RankAndBounded,
            Self::Frozen => Scores::FrozenRank,
            _ => Scores::None,
        }
    }

    /// True if a layer's configuration suffices; only the model of recall has the other arms.
    pub fn is_of_a_layer(self) -> bool {
        let scores = self.deals() || self.scores() == Scores::RankAndBias;
        scores || matches!(self, Self::Dense | Self::Sliding)
    }

    /// True if its layers can deal tokens to their heads: if their scores only rank.
    pub fn deals(self) -> bool {
        matches!(self.scores(), Scores::Rank | Scores::FrozenRank)
    }

    /// True if its scores learn from their ranks alone.
    pub fn learns_by_rank(self) -> bool {
        self.scores() == Scores::Rank
    }

    /// True if a query attends to a limited number of keys.
    pub fn is_pruned(self) -> bool {
        !matches!(self, Self::Dense | Self::Unpruned)
    }

    /// True if part of its window is recent.
    pub fn has_recent(self) -> bool {
        matches!(
            self,
            Self::Ours
                | Self::Added
                | Self::AddedNoRunnersUp
                | Self::AddedZoh
                | Self::Bounded
                | Self::Frozen
        )
    }

    /// Number of most recent keys that its layers always keep; `None` for the layer's default.
    pub fn recent(self, window: usize) -> Option<usize> {
        match self {
            // The layer's default with these scores is 0.
            Self::AddedZoh => Some(window / 4),
            _ if self.has_recent() => None,
            _ => Some(0),
        }
    }

    /// Kind of its layers' scores.
    pub fn layer_scores(self) -> nn::Scores {
        match (self, self.scores()) {
            (Self::AddedZoh, _) => nn::Scores::Dma,
            (_, Scores::RankAndBias | Scores::RankAndBounded) => nn::Scores::Added,
            _ => nn::Scores::Ranking,
        }
    }

    /// True if runners-up learn.
    pub fn has_runners_up(self) -> bool {
        self.is_pruned() && self.runners_up(4) != Some(0)
    }

    /// Number of runners-up; `None` for the layer's default.
    pub fn runners_up(self, window: usize) -> Option<usize> {
        match self {
            Self::Ours | Self::NoRecent | Self::Added | Self::AddedNoRecent | Self::Bounded => None,
            // As above.
            Self::AddedZoh => Some((window / 4).max(8)),
            _ => Some(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::name;

    #[test]
    fn names_are_the_ones_of_the_command_line_and_of_the_rows() {
        for &arm in Arm::value_variants() {
            assert_eq!(serde_json::to_value(arm).unwrap(), name(arm));
        }
    }

    #[test]
    fn an_ablation_differs_from_ours_in_one_thing() {
        let parts = |arm: Arm| (arm.scores(), arm.recent(64), arm.runners_up(64));
        let (scores, recent, runners_up) = parts(Arm::Ours);
        assert_eq!(parts(Arm::NoRecent), (scores, Some(0), runners_up));
        let added = Scores::RankAndBias;
        assert_eq!(parts(Arm::Added), (added, recent, runners_up));
        assert_eq!(parts(Arm::AddedNoRunnersUp), (added, recent, Some(0)));
        assert_eq!(parts(Arm::AddedNoRecent), (added, Some(0), runners_up));
        // Defaults of the other arms' layers.
        assert_eq!(parts(Arm::AddedZoh), (added, Some(16), Some(16)));
        assert_ne!(Arm::AddedZoh.layer_scores(), Arm::Added.layer_scores());
        let bounded = Scores::RankAndBounded;
        assert_eq!(parts(Arm::Bounded), (bounded, recent, runners_up));
    }
}

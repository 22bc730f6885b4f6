//! What chooses the keys: ours, and the controls.

use burn_flash_dma::nn;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What chooses the keys that a query attends to, within `w` keys per query and kv head.
///
/// Every arm has the same parameters, initial values and data; a control that adds no scores leaves the parameters of
/// the scores alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// All keys, and nothing added to their logits.
    Dense,
    /// The layer as it is by default, but for what options say: linear scores that rank the keys and are not added to their
    /// logits, a quarter of the window recent.
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
    /// [`Added`](Self::Added), but of a score `z` only `4 tanh(z / 4)` is added to the logits: it ranks as it is, and
    /// cannot outweigh them. Of recall.
    Bounded,
    /// Ours with scores that stay a random projection of the tokens: they rank the keys, nothing is added to the
    /// logits, and no gradient passes through them. Of recall.
    Frozen,
    /// The first `w` keys. Of recall.
    First,
    /// The last `w` keys.
    Sliding,
    /// The first 4 keys (a quarter of a smaller window than 16), and the last of them up to `w`: StreamingLLM's. Of
    /// recall.
    Sinks,
    /// Positional windows of different lengths per kv head, as many keys in the sum: CoWA's form. Half of the heads
    /// see the last `w / 4` keys, the others the last `2 w − w / 4`. Of recall.
    HeadWindows,
    /// The keys that will be asked for: see [`oracle`](crate::recall::keys::oracle). Of recall.
    Oracle,
}

/// How an arm makes the scores of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The layer's own rank the keys and are added to the logits.
    RankAndBias,
    /// The layer's own rank the keys; within bounds they are added to the logits.
    RankAndBounded,
    /// The layer's own rank the keys, and are added to nothing.
    Rank,
    /// The layer's own rank the keys, as they were drawn.
    FrozenRank,
    /// None.
    None,
}

impl Arm {
    /// How it makes scores.
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

    /// Whether a layer does it by its configuration alone; others only the model of recall does.
    pub fn is_of_a_layer(self) -> bool {
        let scores = matches!(self.scores(), Scores::Rank | Scores::RankAndBias);
        scores || matches!(self, Self::Dense | Self::Sliding)
    }

    /// Whether its layers can deal tokens to their heads: if their scores only rank.
    pub fn deals(self) -> bool {
        matches!(self.scores(), Scores::Rank | Scores::FrozenRank)
    }

    /// Whether its scores learn, and only by what they rank.
    pub fn learns_by_rank(self) -> bool {
        self.scores() == Scores::Rank
    }

    /// Whether a query attends to a limited number of keys.
    pub fn is_pruned(self) -> bool {
        !matches!(self, Self::Dense | Self::Unpruned)
    }

    /// Whether a part of its window is recent.
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

    /// The last keys that its layers keep whatever their scores; `None` is what they do by themselves.
    pub fn recent(self, window: usize) -> Option<usize> {
        match self {
            // The layer has none by itself with these scores.
            Self::AddedZoh => Some(window / 4),
            _ if self.has_recent() => None,
            _ => Some(0),
        }
    }

    /// The scores of its layers.
    pub fn layer_scores(self) -> nn::Scores {
        match (self, self.scores()) {
            (Self::AddedZoh, _) => nn::Scores::Dma,
            (_, Scores::RankAndBias | Scores::RankAndBounded) => nn::Scores::Added,
            _ => nn::Scores::Ranking,
        }
    }

    /// Whether scores of keys ranked next learn.
    pub fn has_runners_up(self) -> bool {
        self.is_pruned() && self.runners_up(4) != Some(0)
    }

    /// The keys ranked next whose scores learn; `None` is what the layer does by itself.
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
        // What the layers of the others have by themselves.
        assert_eq!(parts(Arm::AddedZoh), (added, Some(16), Some(16)));
        assert_ne!(Arm::AddedZoh.layer_scores(), Arm::Added.layer_scores());
        let bounded = Scores::RankAndBounded;
        assert_eq!(parts(Arm::Bounded), (bounded, recent, runners_up));
    }
}

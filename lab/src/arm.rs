//! What chooses the keys: ours, and the controls.

use burn_flash_dma::nn::ScoreForm;
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
    /// The layer as it is by default, with a quarter of the window recent: linear scores that rank the keys and are not
    /// added to their logits. The loss does not reach the score of a key that is kept; the scores learn by the gradient
    /// of the layer's own number of runners-up alone (a quarter of the window).
    Ours,
    /// Ours without recent keys: the whole window by score.
    NoRecent,
    /// [`NoRecent`](Self::NoRecent), but what runners-up gain, kept keys lose a tenth of: the scores of a head count as
    /// differences from a tenth of the mean score of its kept keys, each weighted by how long it is kept. The keys that
    /// are kept stay the same; a key that is kept and useless gives its place away in time. Of recall.
    Centred,
    /// Ours with the paper's score form.
    Zoh,
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
    /// The layer's own rank the keys, as differences from a part of the mean of those that are kept, and are added to
    /// nothing.
    RankCentred,
    /// The layer's own rank the keys, as they were drawn.
    FrozenRank,
    /// None.
    None,
}

impl Arm {
    /// How it makes scores.
    pub fn scores(self) -> Scores {
        match self {
            Self::Ours | Self::NoRecent | Self::Zoh => Scores::Rank,
            Self::Centred => Scores::RankCentred,
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
        self.learns_by_rank() || self.scores() == Scores::FrozenRank
    }

    /// Whether its scores learn, and only by what they rank.
    pub fn learns_by_rank(self) -> bool {
        matches!(self.scores(), Scores::Rank | Scores::RankCentred)
    }

    /// Whether a query attends to a limited number of keys.
    pub fn is_pruned(self) -> bool {
        !matches!(self, Self::Dense | Self::Unpruned)
    }

    /// The last keys that its layers keep whatever their scores.
    pub fn recent(self, window: usize) -> usize {
        match self {
            Self::Ours
            | Self::Zoh
            | Self::Added
            | Self::AddedNoRunnersUp
            | Self::AddedZoh
            | Self::Bounded
            | Self::Frozen => window / 4,
            _ => 0,
        }
    }

    /// What its scores are made of.
    pub fn score_form(self) -> ScoreForm {
        match self {
            Self::Zoh | Self::AddedZoh => ScoreForm::Zoh,
            _ => ScoreForm::Linear,
        }
    }

    /// Whether scores of keys ranked next learn.
    pub fn has_runners_up(self) -> bool {
        self.is_pruned() && self.runners_up(4) != Some(0)
    }

    /// The keys ranked next whose scores learn; `None` is what the layer does by itself.
    pub fn runners_up(self, window: usize) -> Option<usize> {
        match self {
            Self::Ours
            | Self::NoRecent
            | Self::Centred
            | Self::Zoh
            | Self::Added
            | Self::AddedNoRecent
            | Self::Bounded => None,
            // The layer has none by itself for scores of this form that are added.
            Self::AddedZoh => Some(window / 4),
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
        let parts = |arm: Arm| (arm.scores(), arm.recent(16), arm.runners_up(16));
        let (scores, recent, runners_up) = parts(Arm::Ours);
        assert_eq!(parts(Arm::NoRecent), (scores, 0, runners_up));
        assert_eq!(parts(Arm::Centred), (Scores::RankCentred, 0, runners_up));
        assert_eq!(parts(Arm::Zoh), parts(Arm::Ours));
        assert_ne!(Arm::Zoh.score_form(), Arm::Ours.score_form());
        let added = Scores::RankAndBias;
        assert_eq!(parts(Arm::Added), (added, recent, runners_up));
        assert_eq!(Arm::Added.score_form(), Arm::Ours.score_form());
        assert_eq!(parts(Arm::AddedNoRunnersUp), (added, recent, Some(0)));
        assert_eq!(parts(Arm::AddedNoRecent), (added, 0, runners_up));
        assert_eq!(parts(Arm::AddedZoh), (added, recent, Some(4)));
        assert_eq!(Arm::AddedZoh.score_form(), Arm::Zoh.score_form());
        let bounded = Scores::RankAndBounded;
        assert_eq!(parts(Arm::Bounded), (bounded, recent, runners_up));
    }
}

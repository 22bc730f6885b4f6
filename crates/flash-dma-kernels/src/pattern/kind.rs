//! The keys that a kernel's queries attend to and the biases added to their logits: compile-time configuration.

use flash_dma_problem::{MaskedProblem, Problem};

/// The keys that a kernel reads, and their biases: one variant for each combination that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pattern {
    /// All keys; under causal masking, those up to the query's position.
    All(Bias),
    /// Each key on its interval of positions, from lists. Its score is a bias that the heads of a group share.
    Intervals,
    /// The keys that a tile plan of an arbitrary mask leaves.
    Planned(Bias),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bias {
    None,
    /// A number per key, for all queries. Also one per key and query head in kernels other than dk and dv, which alone
    /// have to distinguish these.
    Key,
    /// A number per key and query head; the heads of a group must not share its gradients.
    HeadKey,
    /// A number per query and key, broadcast on any axis.
    Pair,
}

impl Pattern {
    /// The pattern of the operation on scores.
    pub(crate) fn scored(problem: &Problem) -> Self {
        Self::scored_if(problem.has_scores)
    }

    /// The pattern of keys with scores, or of all keys.
    pub(crate) fn scored_if(has_scores: bool) -> Self {
        if has_scores {
            Self::Intervals
        } else {
            Self::All(Bias::None)
        }
    }

    /// The pattern of the operation on a mask and a bias.
    pub(crate) fn masked(problem: &MaskedProblem, bias: Bias) -> Self {
        if problem.plan.is_some() {
            Self::Planned(bias)
        } else {
            Self::All(bias)
        }
    }

    /// True if keys come from lists of intervals.
    pub(crate) fn has_intervals(self) -> bool {
        self == Self::Intervals
    }

    /// True if keys come from a tile plan.
    pub(crate) fn is_planned(self) -> bool {
        matches!(self, Self::Planned(_))
    }

    /// The bias added to the logits, not counting the score of a key with an interval.
    pub(crate) fn bias(self) -> Bias {
        match self {
            Self::All(bias) | Self::Planned(bias) => bias,
            Self::Intervals => Bias::None,
        }
    }

    /// True if keys carry a bias, other than the score of an interval, that all queries share.
    pub(crate) fn has_key_bias(self) -> bool {
        matches!(self.bias(), Bias::Key | Bias::HeadKey)
    }

    /// True if each query head of a group has its own bias for a key.
    pub(crate) fn has_head_bias(self) -> bool {
        self.bias() == Bias::HeadKey
    }

    /// True if keys have a score or a bias that the query heads of a group share.
    pub(crate) fn has_shared_score(self) -> bool {
        self.has_intervals() || self.bias() == Bias::Key
    }

    /// True if keys or pairs have a score or a bias.
    pub(crate) fn adds_scores(self) -> bool {
        self.has_intervals() || self.bias() != Bias::None
    }

    /// True if pairs of a query and a key carry a bias.
    pub(crate) fn has_pair_bias(self) -> bool {
        self.bias() == Bias::Pair
    }
}

impl Bias {
    /// The bias as the tensor-core kernels read it.
    pub(crate) fn of(problem: &MaskedProblem) -> Self {
        match problem.bias {
            None => Self::None,
            Some(_) if problem.has_key_bias() => Self::Key,
            Some(_) => Self::Pair,
        }
    }

    /// The bias as the portable kernels read it: by its strides, whatever its shape.
    pub(crate) fn strided(problem: &MaskedProblem) -> Self {
        match problem.bias {
            None => Self::None,
            Some(_) => Self::Pair,
        }
    }
}

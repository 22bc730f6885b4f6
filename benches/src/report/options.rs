//! Options of training programs that their rows tell, in words.

use serde::Deserialize;
use std::fmt;

/// In which share of the steps the window was wider.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Narrowing {
    /// In stages of half as many keys.
    Halving(f64),
    /// A little narrower with every step.
    Gradual {
        /// The share.
        gradual: f64,
    },
}

impl Default for Narrowing {
    fn default() -> Self {
        Self::Halving(0.0)
    }
}

/// How tokens were dealt to the heads.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RoundRobin {
    run: usize,
    penalty: f64,
}

/// What kept keys learned.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct LeaveOneOut {
    /// The weight besides each.
    pub(super) besides: f64,
}

/// What the scores of a head competed for.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RankSoftmax {
    /// The factor on the scores.
    pub(super) inverse_temperature: f64,
}

/// A penalty of more than this no score makes up for.
const STRICT: f64 = 100.0;

/// With a comma before it, to stand behind an arm; nothing if the window was the same in all steps.
impl fmt::Display for Narrowing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Halving(0.0) => Ok(()),
            Self::Halving(share) => write!(f, ", narrowing {share}"),
            Self::Gradual { gradual } => write!(f, ", gradual narrowing {gradual}"),
        }
    }
}

/// With a comma before it, to stand behind an arm.
impl fmt::Display for RoundRobin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", heads in turn ({}", self.run)?;
        match self.penalty > STRICT {
            true => write!(f, ")"),
            false => write!(f, ", penalty {})", self.penalty),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_told_as_the_rows_have_them() {
        let narrowing = |row: &str| serde_json::from_str::<Narrowing>(row).unwrap().to_string();
        assert_eq!(narrowing("0.0"), "");
        assert_eq!(narrowing("0.5"), ", narrowing 0.5");
        assert_eq!(narrowing("{\"gradual\":0.5}"), ", gradual narrowing 0.5");
        let dealt = |row: &str| serde_json::from_str::<RoundRobin>(row).unwrap().to_string();
        assert_eq!(
            dealt("{\"run\":2,\"penalty\":1000.0}"),
            ", heads in turn (2)"
        );
        assert_eq!(
            dealt("{\"run\":4,\"penalty\":1.5}"),
            ", heads in turn (4, penalty 1.5)"
        );
    }
}

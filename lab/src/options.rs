//! Types of options that are more than a number.

use crate::Result;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Consecutive seeds: a number, or an inclusive range, as in `3..5`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(RangeInclusive<u64>);

impl Seeds {
    /// Each of them.
    pub fn each(&self) -> RangeInclusive<u64> {
        self.0.clone()
    }
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no seed"));
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let (first, last) = (number(first)?, number(last)?);
        match first <= last {
            true => Ok(Self(first..=last)),
            false => Err(format!("{first} is behind {last}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_seeds_have_both_of_their_ends() {
        let each = |text: &str| Some(text.parse::<Seeds>().ok()?.each().collect::<Vec<_>>());
        assert_eq!(each("7"), Some(vec![7]));
        assert_eq!(each("1..3"), Some(vec![1, 2, 3]));
        for wrong in ["3..1", "1..", "a"] {
            assert_eq!(each(wrong), None, "{wrong}");
        }
    }
}

//! Texts that are short when a training begins.
//!
//! In a long text many facts compete for every question, and a model learns nothing for thousands of steps, dense
//! attention included. In a short one it learns to look facts up soon, and goes on with longer ones.

use crate::task::Task;
use train_text::stages::Share;

/// Tokens of the shortest texts.
const SHORTEST: usize = 64;

/// How many times shorter the texts of a step are, counted from 0, of all the steps, if they are shorter than in the end
/// in this share of them: 64 tokens at first (or up to twice as many, of which the length is a multiple by a power of two),
/// then twice as many, and so on. A power of two.
pub fn divisor(share: Share, tokens: usize, step: usize, steps: usize) -> usize {
    let stages = (tokens / SHORTEST).max(1).ilog2();
    match share.stage(stages, step, steps) {
        Some(stage) => 1 << (stages - stage),
        None => 1,
    }
}

impl Task {
    /// Texts that are so many times shorter, with as many kinds of tokens.
    pub fn shortened(self, divisor: usize) -> Self {
        Self {
            tokens: self.tokens / divisor,
            pairs: self.pairs / divisor,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Layout;

    #[test]
    fn texts_lengthen_by_doubling_and_then_stay() {
        let divisors = |share: &str, tokens| {
            let share: Share = share.parse().unwrap();
            [0, 24, 25, 49, 50, 99].map(|step| divisor(share, tokens, step, 100))
        };
        assert_eq!(divisors("0.5", 256), [4, 4, 2, 2, 1, 1]);
        assert_eq!(divisors("0.5", 300), [4, 4, 2, 2, 1, 1]);
        assert_eq!(divisors("0.5", 64), [1; 6]);
        assert_eq!(divisors("0", 256), [1; 6]);
    }

    #[test]
    fn a_short_text_has_the_tokens_of_a_long_one() {
        let long = Task::new(4096, Layout::Scattered);
        let short = long.shortened(64);
        assert_eq!((short.tokens, short.pairs), (64, 4));
        assert_eq!(short.vocabulary(), long.vocabulary());
        assert_eq!(long.shortened(1), long);
    }
}

//! A draft without a model.

use super::draft::{Draft, DraftLimits, DraftRow, Proposal};
use super::error::GenerateError;
use super::sampler::Sampler;

/// Proposes the continuation of an earlier occurrence of a text's last tokens: for summaries, code, and other texts
/// that repeat their prompts.
///
/// Looks for the longest run of last tokens, at most `ngram`, that occurred before, and takes its last occurrence.
/// Without one it proposes nothing. In a batch, only as many tokens are verified as the sequence with the fewest
/// proposals has, so this suits a single sequence.
///
/// ```
/// # use flash_dma_models::generate::{Draft, DraftRow, PromptLookup, Sampler};
/// let mut draft = PromptLookup::new(2, 3);
/// let row = DraftRow { sequence: 0, text: &[5, 6, 7, 8, 9, 5, 6], written: 0 };
/// let proposals = draft.try_propose(&[row], 3, &Sampler::greedy()).unwrap();
/// assert_eq!(proposals[0].tokens(), [7, 8, 9]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    ngram: usize,
    count: usize,
}

impl PromptLookup {
    /// Compares up to `ngram` tokens and proposes up to `count`, both at least 1.
    #[must_use]
    pub fn new(ngram: usize, count: usize) -> Self {
        Self { ngram, count }
    }

    /// The tokens after the last earlier occurrence.
    fn look_up<'a>(&self, text: &'a [u32], count: usize) -> &'a [u32] {
        let longest = self.ngram.min(text.len().saturating_sub(1));
        for len in (1..=longest).rev() {
            let last = &text[text.len() - len..];
            // Without the end itself, which nothing follows.
            let mut before = text[..text.len() - 1].windows(len);
            if let Some(begin) = before.rposition(|window| window == last) {
                let follows = &text[begin + len..];
                return &follows[..count.min(follows.len())];
            }
        }
        &[]
    }
}

impl Draft for PromptLookup {
    fn count(&self) -> usize {
        self.count
    }

    fn try_check(&self, _: &[&[u32]], _: DraftLimits) -> Result<(), GenerateError> {
        let what = "the number of tokens that a lookup compares";
        match self.ngram {
            0 => Err(GenerateError::Zero(what)),
            _ => Ok(()),
        }
    }

    fn try_propose(
        &mut self,
        rows: &[DraftRow<'_>],
        count: usize,
        _: &Sampler,
    ) -> Result<Vec<Proposal>, GenerateError> {
        let propose = |row: &DraftRow<'_>| Proposal::certain(self.look_up(row.text, count));
        Ok(rows.iter().map(propose).collect())
    }
}

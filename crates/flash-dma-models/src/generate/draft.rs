//! Drafts, which propose tokens for a model to verify.

use super::batch::Batch;
use super::check::check_lengths;
use super::distribution::Distribution;
use super::error::GenerateError;
use super::laws::Laws;
use super::sampler::{Draw, Purpose, Sampler};
use crate::language_model::LanguageModel;

/// Proposes tokens that [`Generator::try_speculate`](super::Generator::try_speculate) verifies.
///
/// Proposals do not change a greedy text, nor the distribution of a sampled one. Good proposals reduce the number of
/// steps.
pub trait Draft {
    /// Maximum number of tokens proposed at a time, at least 1. The model verifies one more in a step; up to 16 are
    /// one decode step.
    fn count(&self) -> usize;

    /// Size of its vocabulary, if it has its own: it must be the model's.
    fn vocabulary(&self) -> Option<usize> {
        None
    }

    /// Refuses prompts that it cannot continue, before anything is computed.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] for a refusal.
    fn try_check(&self, prompts: &[&[u32]], limits: DraftLimits) -> Result<(), GenerateError> {
        let _ = (prompts, limits);
        Ok(())
    }

    /// Begins with new, checked prompts and forgets all others: for a draft with memory.
    ///
    /// # Errors
    ///
    /// Errors of reading the prompts.
    fn try_begin(&mut self, prompts: &[&[u32]], limits: DraftLimits) -> Result<(), GenerateError> {
        let _ = (prompts, limits);
        Ok(())
    }

    /// Proposes 0 to `count` tokens for each row. Since the last call a row has grown by tokens that may be the
    /// proposed ones or others.
    ///
    /// # Errors
    ///
    /// Errors of the draft's model.
    fn try_propose(
        &mut self,
        rows: &[DraftRow<'_>],
        count: usize,
        sampler: &Sampler,
    ) -> Result<Vec<Proposal>, GenerateError>;

    /// Keeps these rows, ascending: the others have ended.
    ///
    /// # Errors
    ///
    /// Errors of the draft's caches.
    fn try_retain(&mut self, rows: &[usize]) -> Result<(), GenerateError> {
        let _ = rows;
        Ok(())
    }
}

/// Sizes of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLimits {
    /// Maximum number of prompt tokens read at once.
    pub chunk: usize,
    /// Maximum number of tokens after a prompt.
    pub max_new: usize,
}

/// A sequence for a draft to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRow<'a> {
    /// The index of the prompt.
    pub sequence: usize,
    /// The prompt and the tokens written after it.
    pub text: &'a [u32],
    /// Number of tokens written.
    pub written: usize,
}

impl DraftRow<'_> {
    /// Random draw of a proposal, `ahead` tokens after the next.
    #[must_use]
    pub fn draw(&self, ahead: usize) -> Draw {
        Draw {
            sequence: self.sequence,
            token: self.written + ahead,
            purpose: Purpose::Proposal,
        }
    }
}

/// Tokens that may follow a text, each with the distribution it was drawn from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    tokens: Vec<u32>,
    laws: Vec<Distribution>,
}

impl Proposal {
    /// Tokens without randomness.
    #[must_use]
    pub fn certain(tokens: &[u32]) -> Self {
        Self {
            tokens: tokens.to_vec(),
            laws: tokens.iter().copied().map(Distribution::certain).collect(),
        }
    }

    /// Draws the next token from a distribution by a number from 0 to 1.
    pub fn draw(&mut self, law: Distribution, unit: f64) {
        self.tokens.push(law.at(unit));
        self.laws.push(law);
    }

    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(super) fn laws(&self) -> &[Distribution] {
        &self.laws
    }

    pub(super) fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
        self.laws.truncate(count);
    }
}

/// A smaller model as a draft. The generator's sampler draws its tokens.
///
/// Its caches hold only what the texts hold: clones of them read proposals and are then dropped. So nothing has to be
/// undone, and a cache of a window is copied once per round.
pub struct ModelDraft<'a, M: ?Sized> {
    model: &'a M,
    count: usize,
    /// The caches, and the number of tokens of each text in them.
    state: Option<(Batch<'a, M>, Vec<usize>)>,
}

impl<M: ?Sized> std::fmt::Debug for ModelDraft<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let read = self.state.as_ref().map(|(_, read)| read);
        let mut out = f.debug_struct("ModelDraft");
        out.field("count", &self.count)
            .field("read", &read)
            .finish_non_exhaustive()
    }
}

impl<'a, M: ?Sized> ModelDraft<'a, M> {
    /// A draft that proposes `count` tokens at a time, at least 1.
    pub fn new(model: &'a M, count: usize) -> Self {
        Self {
            model,
            count,
            state: None,
        }
    }
}

impl<M: LanguageModel + ?Sized> Draft for ModelDraft<'_, M> {
    fn count(&self) -> usize {
        self.count
    }

    fn vocabulary(&self) -> Option<usize> {
        Some(self.model.vocabulary())
    }

    fn try_check(&self, prompts: &[&[u32]], limits: DraftLimits) -> Result<(), GenerateError> {
        check_lengths(self.model.max_len(), "draft", prompts, limits.max_new)
    }

    fn try_begin(&mut self, prompts: &[&[u32]], limits: DraftLimits) -> Result<(), GenerateError> {
        let (batch, _) = Batch::prefill(self.model, prompts, limits.chunk)?;
        let read = prompts.iter().map(|prompt| prompt.len()).collect();
        self.state = Some((batch, read));
        Ok(())
    }

    fn try_propose(
        &mut self,
        rows: &[DraftRow<'_>],
        count: usize,
        sampler: &Sampler,
    ) -> Result<Vec<Proposal>, GenerateError> {
        let (batch, read) = self.state.as_mut().expect("the draft has begun");
        // Tokens accepted since the last call: the same number for every row.
        let rows_read = rows.iter().zip(&*read);
        let new = rows_read.map(|(row, &read)| &row.text[read..]);
        let mut logits = batch.read(batch.tokens(new), 1)?;
        *read = rows.iter().map(|row| row.text.len()).collect();

        let mut proposals = vec![Proposal::default(); rows.len()];
        let mut guess = None;
        for ahead in 0..count {
            let laws = Laws::read(logits.clone(), sampler)?;
            for (index, (row, proposal)) in rows.iter().zip(&mut proposals).enumerate() {
                let law = laws.law(index, sampler, row.text, &proposal.tokens);
                let law = law.map_err(|source| GenerateError::Sample {
                    model: "draft",
                    sequence: row.sequence,
                    written: row.written + ahead,
                    source,
                })?;
                proposal.draw(law, sampler.unit(row.draw(ahead)));
            }
            if ahead + 1 < count {
                let guess = guess.get_or_insert_with(|| batch.clone());
                let last = proposals.iter().map(|proposal| &proposal.tokens[ahead..]);
                logits = guess.read(guess.tokens(last), 1)?;
            }
        }
        Ok(proposals)
    }

    fn try_retain(&mut self, rows: &[usize]) -> Result<(), GenerateError> {
        let (batch, read) = self.state.as_mut().expect("the draft has begun");
        batch.keep(rows)?;
        *read = rows.iter().map(|&row| read[row]).collect();
        Ok(())
    }
}

//! Speculative decoding: a draft proposes tokens, and the model verifies several in one step.

use super::batch::Batch;
use super::check::check_tokens;
use super::distribution::Distribution;
use super::draft::{Draft, DraftLimits, DraftRow, Proposal};
use super::error::{GenerateError, TokenPlace};
use super::generator::{Generator, Texts};
use super::laws::Laws;
use super::sampler::Purpose;
use super::text::{Event, Generated, Writing};
use crate::language_model::LanguageModel;
use crate::nn::expect;
use std::ops::ControlFlow;

/// Result of [`Generator::try_speculate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speculated {
    /// Text after each prompt.
    pub texts: Vec<Generated>,
    /// Accuracy of the draft.
    pub report: Speculation,
}

/// Accuracy of a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// Steps of the model after the prompts.
    pub steps: usize,
    /// Tokens that the model verified, over all sequences.
    pub proposed: usize,
    /// Tokens that it accepted. In a batch fewer may be written: as many as the sequence with the fewest has.
    pub accepted: usize,
    /// Tokens written in these steps: all but the first of each text, which the prompt gives.
    pub written: usize,
}

impl Speculation {
    /// Share of accepted proposals; 0 if there were none.
    #[must_use]
    pub fn acceptance_rate(&self) -> f64 {
        self.accepted as f64 / self.proposed.max(1) as f64
    }
}

impl<M: LanguageModel + ?Sized> Generator<'_, M> {
    /// Generates a text after each prompt, with tokens that `draft` proposes and the model verifies.
    ///
    /// # Panics
    ///
    /// If [`try_speculate`](Self::try_speculate) returns an error, with that error's text.
    #[must_use]
    pub fn speculate<P: AsRef<[u32]>>(
        &self,
        prompts: &[P],
        draft: &mut (impl Draft + ?Sized),
    ) -> Speculated {
        expect(self.try_speculate(prompts, draft, |_| ControlFlow::Continue(())))
    }

    /// Like [`try_stream`](Self::try_stream), but in each step the model reads the last token and the tokens that
    /// `draft` proposes after it. The caches hold these tokens back until it is known how many are right, and then
    /// take only those.
    ///
    /// - A **greedy** text is that of the model alone. Two logits that are equal up to rounding may swap ranks in a
    ///   step of several tokens, whose products are summed in another order; the result is then another text that the
    ///   model holds equally likely.
    /// - A **sampled** text has the same distribution as without a draft: a proposal is accepted with probability
    ///   `min(1, p / q)`, for the distributions `p` of the model and `q` of the draft, and otherwise replaced by a
    ///   draw from the normalised positive part of `p − q` (Leviathan et al., 2023). With the same seed it is another
    ///   text than without a draft, and in a batch it may depend on the other sequences, because they decide where a
    ///   step begins.
    ///
    /// In a batch all unfinished sequences advance by the same number of tokens: one more than the fewest accepted
    /// proposals.
    ///
    /// # Errors
    ///
    /// Errors of [`try_stream`](Self::try_stream), and [`GenerateError`] if the draft has another vocabulary, cannot
    /// continue the prompts, or makes invalid proposals.
    pub fn try_speculate<P: AsRef<[u32]>>(
        &self,
        prompts: &[P],
        draft: &mut (impl Draft + ?Sized),
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Speculated, GenerateError> {
        self.check(prompts)?;
        let prompts: Vec<&[u32]> = prompts.iter().map(AsRef::as_ref).collect();
        let limits = self.check_draft(&prompts, draft)?;
        let (mut texts, mut report) = (Texts::new(&prompts), Speculation::default());
        if texts.active.is_empty() || self.stops.max_new == 0 {
            return Ok(Speculated {
                texts: texts.finish(),
                report,
            });
        }
        let (mut batch, logits) = Batch::prefill(self.model, &prompts, self.chunk)?;
        draft.try_begin(&prompts, limits)?;
        let laws = Laws::read(logits, &self.sampler)?;
        let mut count = texts.active.len();
        let mut kept = self.write(&laws, &mut texts, &mut on_event)?;
        while !kept.is_empty() {
            if kept.len() < count {
                batch.keep(&kept)?;
                draft.try_retain(&kept)?;
            }
            count = kept.len();
            let proposals = self.propose(&texts.active, draft)?;
            let verified = self.verify(&mut batch, &texts.active, &proposals, &mut report)?;
            kept = texts.push(&verified, &self.stops, &mut on_event);
        }
        let texts = texts.finish();
        report.written = texts.iter().map(|text| text.tokens.len() - 1).sum();
        Ok(Speculated { texts, report })
    }

    fn check_draft(
        &self,
        prompts: &[&[u32]],
        draft: &(impl Draft + ?Sized),
    ) -> Result<DraftLimits, GenerateError> {
        if draft.count() == 0 {
            let what = "the number of tokens that a draft proposes";
            return Err(GenerateError::Zero(what));
        }
        let model = self.model.vocabulary();
        match draft.vocabulary() {
            Some(draft) if draft != model => {
                return Err(GenerateError::DraftVocabulary { draft, model });
            }
            _ => {}
        }
        let limits = DraftLimits {
            chunk: self.chunk,
            max_new: self.stops.max_new,
        };
        draft.try_check(prompts, limits)?;
        Ok(limits)
    }

    fn propose(
        &self,
        active: &[Writing],
        draft: &mut (impl Draft + ?Sized),
    ) -> Result<Vec<Proposal>, GenerateError> {
        // A step writes at least one token that was not proposed. All rows have the same number of new tokens.
        let left = self.stops.max_new - active[0].new_tokens().len();
        let (count, rows) = (draft.count().min(left - 1), active.len());
        if count == 0 {
            return Ok(vec![Proposal::default(); rows]);
        }
        let views: Vec<DraftRow<'_>> = active.iter().map(Writing::view).collect();
        let mut proposals = draft.try_propose(&views, count, &self.sampler)?;
        let lengths = || proposals.iter().map(|proposal| proposal.tokens().len());
        let (least, most) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
        let problem = match proposals.len() {
            other if other != rows => Some(format!("it has proposals for {other}")),
            _ => (most > count).then(|| format!("it proposes {most}")),
        };
        if let Some(problem) = problem {
            return Err(GenerateError::Draft {
                count,
                rows,
                problem,
            });
        }
        let vocabulary = self.model.vocabulary();
        for proposal in &mut proposals {
            check_tokens(proposal.tokens(), vocabulary, |_| TokenPlace::Draft)?;
            proposal.truncate(least);
        }
        Ok(proposals)
    }

    /// Reads the last token of each row and its proposals, and returns the tokens that each row writes. The caches of
    /// continuing rows then hold all but their last token.
    fn verify(
        &self,
        batch: &mut Batch<'_, M>,
        active: &[Writing],
        proposals: &[Proposal],
        report: &mut Speculation,
    ) -> Result<Vec<Vec<u32>>, GenerateError> {
        let count = proposals[0].tokens().len();
        let rows = active.iter().zip(proposals);
        let tokens: Vec<Vec<u32>> = rows
            .map(|(writing, proposal)| [writing.last(), proposal.tokens()].concat())
            .collect();
        let tokens = batch.tokens(tokens.iter().map(Vec::as_slice));
        let logits = match count {
            0 => batch.read(tokens, 1)?,
            _ => batch.try_out(tokens)?,
        };
        let laws = Laws::read(logits, &self.sampler)?;
        let mut verified: Vec<Vec<u32>> = Vec::new();
        for (row, (writing, proposal)) in active.iter().zip(proposals).enumerate() {
            // Distribution of the token after the text and `ahead`.
            let law = |ahead: &[u32]| {
                let row = row * (count + 1) + ahead.len();
                let law = laws.law(row, &self.sampler, &writing.text, ahead);
                law.map_err(|source| writing.failed(ahead.len(), source))
            };
            verified.push(self.verified(writing, proposal, law)?);
        }
        report.steps += 1;
        report.proposed += count * active.len();
        let accepted = verified.iter().map(|tokens| tokens.len() - 1);
        report.accepted += accepted.sum::<usize>();
        // A row that ends does not hold up the others.
        let rows = active.iter().zip(&verified);
        let going_on = rows.filter(|(writing, tokens)| !self.ends(writing, tokens));
        let taken = going_on.map(|(_, tokens)| tokens.len()).min();
        let taken = taken.unwrap_or(count + 1);
        for tokens in &mut verified {
            tokens.truncate(taken);
        }
        if count > 0 {
            batch.accept(taken)?;
        }
        Ok(verified)
    }

    /// Accepted proposals, and one token more. `law` gives the distribution of the token after the text and some of
    /// them.
    fn verified(
        &self,
        writing: &Writing,
        proposal: &Proposal,
        law: impl Fn(&[u32]) -> Result<Distribution, GenerateError>,
    ) -> Result<Vec<u32>, GenerateError> {
        let tokens = proposal.tokens();
        let unit = |ahead, purpose| self.sampler.unit(writing.draw(ahead, purpose));
        for (ahead, (&token, guess)) in tokens.iter().zip(proposal.laws()).enumerate() {
            let law = law(&tokens[..ahead])?;
            let odds = law.probability(token) / guess.probability(token);
            if unit(ahead, Purpose::Acceptance) >= odds {
                let replacement = law.without(guess).at(unit(ahead, Purpose::Replacement));
                return Ok([&tokens[..ahead], &[replacement]].concat());
            }
        }
        let last = law(tokens)?.at(unit(tokens.len(), Purpose::Token));
        Ok([tokens, &[last]].concat())
    }

    fn ends(&self, writing: &Writing, tokens: &[u32]) -> bool {
        let written = [writing.new_tokens(), tokens].concat();
        let mut ends = writing.new_tokens().len() + 1..=written.len();
        ends.any(|end| self.stops.ended(&written[..end]).is_some())
    }
}

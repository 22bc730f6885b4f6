//! Beam search for the most likely texts.

use super::batch::Batch;
use super::distribution::{log_softmax, possible, scores};
use super::error::GenerateError;
use super::generator::Generator;
use super::laws::Logits;
use super::text::{Ended, Writing};
use crate::language_model::LanguageModel;
use crate::nn::expect;

/// Settings of a beam search: number and ranking of texts, and when it ends.
///
/// The rules are those of beam search in Hugging Face's `transformers`. A text's **score** is its log probability
/// divided by its length to the power of the length penalty; the length counts new tokens, including a stop token.
/// Each step extends every open text by every token. Of the `n` most likely extensions those that end are finished;
/// the `n` most likely that do not end are the open texts of the next step. The `n` finished texts of greatest score
/// are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    count: usize,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    returned: usize,
}

/// When a beam search ends before the maximum length. Each rule needs as many finished texts as there are beams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// If the most likely open text would not be among the finished ones if it ended now. A heuristic: with a
    /// positive length penalty a longer text still could be (`early_stopping=False` of `transformers`).
    #[default]
    Heuristic,
    /// At once (`early_stopping=True`).
    WhenFull,
    /// If no open text can still be among the finished ones at any length (`early_stopping="never"`).
    WhenHopeless,
}

impl Beams {
    /// `count` beams, a length penalty of 1, and only the best text returned.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            count,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::default(),
            returned: 1,
        }
    }

    /// Sets the power of the length: 0 compares log probabilities, above 0 favours longer texts.
    #[must_use]
    pub fn with_length_penalty(mut self, penalty: f64) -> Self {
        self.length_penalty = penalty;
        self
    }

    /// Sets when the search ends.
    #[must_use]
    pub fn with_early_stopping(mut self, rule: EarlyStopping) -> Self {
        self.early_stopping = rule;
        self
    }

    /// Sets the maximum number of returned texts: from 1 to the number of beams.
    #[must_use]
    pub fn with_returned(mut self, texts: usize) -> Self {
        self.returned = texts;
        self
    }

    fn check(&self) -> Result<(), GenerateError> {
        let (beams, returned) = (self.count, self.returned);
        let penalty = self.length_penalty;
        match (beams, returned) {
            (0, _) => Err(GenerateError::Zero("the number of beams")),
            (_, 0) => Err(GenerateError::Zero("the number of texts to be returned")),
            _ if returned > beams => Err(GenerateError::BeamsReturned { returned, beams }),
            _ if !penalty.is_finite() => Err(GenerateError::LengthPenalty(penalty)),
            _ => Ok(()),
        }
    }

    fn score(&self, log_probability: f64, length: usize) -> f64 {
        log_probability / (length as f64).powf(self.length_penalty)
    }
}

/// A text found by a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct Beam {
    /// Tokens after the prompt, including a stop.
    pub tokens: Vec<u32>,
    /// Reason of its end.
    pub ended: Ended,
    /// Log probability of the tokens after the prompt.
    pub log_probability: f64,
    /// Score that ranks it: see [`Beams`].
    pub score: f64,
}

#[derive(Default)]
struct Open {
    tokens: Vec<u32>,
    log_probability: f64,
}

#[derive(Clone, Copy)]
struct Candidate {
    log_probability: f64,
    row: usize,
    token: u32,
}

impl<M: LanguageModel + ?Sized> Generator<'_, M> {
    /// Texts of greatest score after one prompt, the best first.
    ///
    /// # Panics
    ///
    /// If [`try_beams`](Self::try_beams) returns an error, with that error's text.
    #[must_use]
    pub fn beams(&self, prompt: &[u32], beams: &Beams) -> Vec<Beam> {
        expect(self.try_beams(prompt, beams))
    }

    /// Like [`beams`](Self::beams), but returns the error. Returns fewer texts than requested only if fewer are
    /// possible.
    ///
    /// The sampler must be greedy. Its repetition penalty changes the log probabilities, and so the ranking of a
    /// text. Each step reads the log probabilities of the whole vocabulary to the host, 4 bytes per token and beam.
    ///
    /// # Errors
    ///
    /// Errors of [`try_stream`](Self::try_stream), and [`GenerateError`] if a setting of `beams` is out of its range
    /// or the sampler is not greedy.
    pub fn try_beams(&self, prompt: &[u32], beams: &Beams) -> Result<Vec<Beam>, GenerateError> {
        beams.check()?;
        self.check(&[prompt])?;
        let temperature = self.sampler.temperature();
        if temperature != 0.0 {
            return Err(GenerateError::BeamsDraw { temperature });
        }
        let mut search = Search {
            beams,
            open: vec![Open::default()],
            finished: Vec::new(),
        };
        if self.stops.max_new == 0 {
            search.finish(search.extend(0, None, 0.0), Ended::Length);
            return Ok(search.best());
        }
        let (mut batch, mut logits) = Batch::prefill(self.model, &[prompt], self.chunk)?;
        loop {
            let read = Logits::read(logits)?;
            let candidates = self.candidates(&read, prompt, &search)?;
            let from = self.advance(&mut search, &candidates);
            if from.is_empty() || search.is_done(self.stops.max_new) {
                return Ok(search.best());
            }
            batch.keep(&from)?;
            let texts = search.open.iter().map(|open| &open.tokens);
            let last = texts.map(|tokens| &tokens[tokens.len() - 1..]);
            logits = batch.read(batch.tokens(last), 1)?;
        }
    }

    /// Most likely extensions, the best first: enough that sufficiently many do not end.
    fn candidates(
        &self,
        logits: &Logits,
        prompt: &[u32],
        search: &Search<'_>,
    ) -> Result<Vec<Candidate>, GenerateError> {
        let mut all = Vec::new();
        for (row, open) in search.open.iter().enumerate() {
            let scores = scores(logits.row(row)).and_then(log_softmax);
            let mut scores = scores
                .map_err(|source| Writing::new(0, prompt).failed(open.tokens.len(), source))?;
            let text = [prompt, &open.tokens].concat();
            self.sampler.penalise(&mut scores, &text);
            all.extend(possible(scores).map(|(token, score)| Candidate {
                log_probability: open.log_probability + score,
                row,
                token,
            }));
        }
        // Among equal ones the first text comes first, then the lower token.
        let order = |a: &Candidate, b: &Candidate| {
            let by_score = b.log_probability.total_cmp(&a.log_probability);
            by_score.then((a.row, a.token).cmp(&(b.row, b.token)))
        };
        // Each stop ends at most one continuation of a text.
        let stops = self.stops.tokens.len() + self.stops.sequences.len();
        let enough = search.beams.count.saturating_mul(1 + stops);
        if enough < all.len() {
            all.select_nth_unstable_by(enough, order);
            all.truncate(enough);
        }
        all.sort_unstable_by(order);
        Ok(all)
    }

    /// Finishes the candidates that end and opens the others; returns the rows that these continue.
    fn advance(&self, search: &mut Search<'_>, candidates: &[Candidate]) -> Vec<usize> {
        let (count, mut from, mut open) = (search.beams.count, Vec::new(), Vec::new());
        for (rank, candidate) in candidates.iter().enumerate() {
            let row = candidate.row;
            let extended = search.extend(row, Some(candidate.token), candidate.log_probability);
            match self.stops.ended(&extended.tokens) {
                Some(ended) if rank < count => search.finish(extended, ended),
                None if open.len() < count => {
                    open.push(extended);
                    from.push(row);
                }
                _ => {}
            }
        }
        search.open = open;
        from
    }
}

struct Search<'a> {
    beams: &'a Beams,
    /// Open texts, by row of the batch, the most likely first.
    open: Vec<Open>,
    finished: Vec<Beam>,
}

impl Search<'_> {
    fn extend(&self, row: usize, token: Option<u32>, log_probability: f64) -> Open {
        let tokens = self.open[row].tokens.iter().copied().chain(token);
        Open {
            tokens: tokens.collect(),
            log_probability,
        }
    }

    /// Keeps a finished text if its score is among the greatest. Of equal scores the first stays.
    fn finish(&mut self, open: Open, ended: Ended) {
        let length = open.tokens.len();
        let beam = Beam {
            score: self.beams.score(open.log_probability, length.max(1)),
            log_probability: open.log_probability,
            tokens: open.tokens,
            ended,
        };
        let better = |other: &Beam| other.score >= beam.score;
        let at = self.finished.partition_point(better);
        self.finished.insert(at, beam);
        self.finished.truncate(self.beams.count);
    }

    /// True if no open text is worth continuing, by the rule of early stopping.
    fn is_done(&self, max_new: usize) -> bool {
        // As many as there are beams: at least one.
        let Some(worst) = self.finished.get(self.beams.count - 1) else {
            return false;
        };
        let best = &self.open[0];
        let length = match self.beams.early_stopping {
            EarlyStopping::WhenFull => return true,
            // The score grows with the length then.
            EarlyStopping::WhenHopeless if self.beams.length_penalty > 0.0 => max_new,
            _ => best.tokens.len(),
        };
        self.beams.score(best.log_probability, length) <= worst.score
    }

    fn best(mut self) -> Vec<Beam> {
        self.finished.truncate(self.beams.returned);
        self.finished
    }
}

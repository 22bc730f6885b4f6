//! The texts that are written, and why they end.

use super::draft::DraftRow;
use super::error::{GenerateError, SampleError};
use super::sampler::{Draw, Purpose};
use std::ops::ControlFlow;

/// A text that was generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The tokens after the prompt. A stop token, or a stop sequence, is the end of them.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub ended: Ended,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With this stop token.
    Stop(u32),
    /// With the stop sequence of this index.
    StopSequence(usize),
    /// It has as many tokens as were asked for.
    Length,
    /// The callback said so.
    Callback,
}

/// A token that has just been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The index of the prompt that the text goes on from.
    pub sequence: usize,
    /// How many tokens of the text came before.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Why it is the last, if it is.
    pub ended: Option<Ended>,
}

/// What ends a text without a callback.
#[derive(Clone, Debug)]
pub(super) struct Stops {
    pub(super) max_new: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<Vec<u32>>,
}

impl Stops {
    /// Why a text ends after `written`, if it does. A stop comes before the length.
    pub(super) fn ended(&self, written: &[u32]) -> Option<Ended> {
        let last = *written.last()?;
        if self.tokens.contains(&last) {
            return Some(Ended::Stop(last));
        }
        let ends = |stop: &Vec<u32>| written.ends_with(stop);
        if let Some(index) = self.sequences.iter().position(ends) {
            return Some(Ended::StopSequence(index));
        }
        (written.len() >= self.max_new).then_some(Ended::Length)
    }
}

/// A prompt and what has been written after it.
#[derive(Clone, Debug)]
pub(super) struct Writing {
    /// The index of the prompt.
    pub(super) sequence: usize,
    /// The prompt and the new tokens.
    pub(super) text: Vec<u32>,
    prompt: usize,
}

impl Writing {
    pub(super) fn new(sequence: usize, prompt: &[u32]) -> Self {
        Self {
            sequence,
            text: prompt.to_vec(),
            prompt: prompt.len(),
        }
    }

    /// The new tokens.
    pub(super) fn new_tokens(&self) -> &[u32] {
        &self.text[self.prompt..]
    }

    /// The last token, as the row of a batch.
    pub(super) fn last(&self) -> &[u32] {
        &self.text[self.text.len() - 1..]
    }

    /// The draw of the token that is `ahead` tokens after the next.
    pub(super) fn draw(&self, ahead: usize, purpose: Purpose) -> Draw {
        Draw {
            sequence: self.sequence,
            token: self.new_tokens().len() + ahead,
            purpose,
        }
    }

    /// The error of a text that has no next token, `ahead` tokens after those that have been written.
    pub(super) fn failed(&self, ahead: usize, source: SampleError) -> GenerateError {
        GenerateError::Sample {
            model: "model",
            sequence: self.sequence,
            written: self.new_tokens().len() + ahead,
            source,
        }
    }

    /// The text as a draft sees it.
    pub(super) fn view(&self) -> DraftRow<'_> {
        DraftRow {
            sequence: self.sequence,
            text: &self.text,
            written: self.new_tokens().len(),
        }
    }

    /// Writes a token and tells the callback.
    pub(super) fn push(
        &mut self,
        token: u32,
        stops: &Stops,
        on_event: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Option<Ended> {
        self.text.push(token);
        let ended = stops.ended(self.new_tokens());
        let event = Event {
            sequence: self.sequence,
            index: self.new_tokens().len() - 1,
            token,
            ended,
        };
        match (ended, on_event(event)) {
            (None, ControlFlow::Break(())) => Some(Ended::Callback),
            (ended, _) => ended,
        }
    }

    /// The text, which has ended.
    pub(super) fn finish(self, ended: Ended) -> Generated {
        Generated {
            tokens: self.text[self.prompt..].to_vec(),
            ended,
        }
    }
}

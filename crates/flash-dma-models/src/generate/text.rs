//! Generated texts, and why they end.

use super::draft::DraftRow;
use super::error::{GenerateError, SampleError};
use super::sampler::{Draw, Purpose};
use std::ops::ControlFlow;

/// A generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// Tokens after the prompt, including a stop token or a stop sequence at their end.
    pub tokens: Vec<u32>,
    /// Reason of its end.
    pub ended: Ended,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// At this stop token.
    Stop(u32),
    /// At the stop sequence of this index.
    StopSequence(usize),
    /// At the maximum length.
    Length,
    /// On request of the callback.
    Callback,
}

/// A token that has just been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of the text's prompt.
    pub sequence: usize,
    /// Number of earlier tokens of the text.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Reason of the text's end, if this is its last token.
    pub ended: Option<Ended>,
}

#[derive(Clone, Debug)]
pub(super) struct Stops {
    pub(super) max_new: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<Vec<u32>>,
}

impl Stops {
    /// Reason for a text to end after `written`, if any. A stop takes precedence over the length.
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

#[derive(Clone, Debug)]
pub(super) struct Writing {
    pub(super) sequence: usize,
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

    pub(super) fn new_tokens(&self) -> &[u32] {
        &self.text[self.prompt..]
    }

    pub(super) fn last(&self) -> &[u32] {
        &self.text[self.text.len() - 1..]
    }

    /// Random draw of the token `ahead` tokens after the next.
    pub(super) fn draw(&self, ahead: usize, purpose: Purpose) -> Draw {
        Draw {
            sequence: self.sequence,
            token: self.new_tokens().len() + ahead,
            purpose,
        }
    }

    /// Error of a text without a next token, `ahead` tokens after those written.
    pub(super) fn failed(&self, ahead: usize, source: SampleError) -> GenerateError {
        GenerateError::Sample {
            model: "model",
            sequence: self.sequence,
            written: self.new_tokens().len() + ahead,
            source,
        }
    }

    pub(super) fn view(&self) -> DraftRow<'_> {
        DraftRow {
            sequence: self.sequence,
            text: &self.text,
            written: self.new_tokens().len(),
        }
    }

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

    pub(super) fn finish(self, ended: Ended) -> Generated {
        Generated {
            tokens: self.text[self.prompt..].to_vec(),
            ended,
        }
    }
}

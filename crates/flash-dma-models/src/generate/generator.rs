//! Generation for batches of prompts.

use super::batch::Batch;
use super::check::{check_lengths, check_tokens};
use super::error::{GenerateError, TokenPlace};
use super::laws::Laws;
use super::sampler::{Purpose, Sampler};
use super::steps::Steps;
use super::text::{Ended, Event, Generated, Stops, Writing};
use crate::language_model::LanguageModel;
use crate::nn::expect;
use std::ops::ControlFlow;

/// Generates texts after prompts.
///
/// Prompts of one length are read together, in chunks; then all sequences continue as one batch. A finished sequence
/// leaves the batch and its caches. The other texts do not depend on that, except through the rounding of products of
/// another size: if two logits are equal up to rounding, or a draw falls on the border between two tokens, a sequence
/// may continue differently in another batch.
///
/// ```
/// # use flash_dma_models::{LanguageModel, generate::{GenerateError, Generator, Sampler}};
/// # fn example(model: &impl LanguageModel, end: u32) -> Result<(), GenerateError> {
/// let generator = Generator::new(model)
///     .with_sampler(Sampler::random(7).with_temperature(0.8).with_top_p(0.95))
///     .with_max_new(100)
///     .with_stop(&[end]);
/// for text in generator.try_generate(&[vec![1, 2, 3], vec![4, 5]])? {
///     println!("{:?}, because {:?}", text.tokens, text.ended);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Generator<'a, M: ?Sized> {
    pub(super) model: &'a M,
    pub(super) sampler: Sampler,
    pub(super) stops: Stops,
    pub(super) chunk: usize,
    replay: bool,
}

impl<M: ?Sized> Clone for Generator<'_, M> {
    fn clone(&self) -> Self {
        Self {
            model: self.model,
            sampler: self.sampler,
            stops: self.stops.clone(),
            chunk: self.chunk,
            replay: self.replay,
        }
    }
}

impl<'a, M: ?Sized> Generator<'a, M> {
    /// Greedy, up to 128 new tokens, without stops, and with prompts in chunks of 512 tokens.
    pub fn new(model: &'a M) -> Self {
        Self {
            model,
            sampler: Sampler::greedy(),
            stops: Stops {
                max_new: 128,
                tokens: Vec::new(),
                sequences: Vec::new(),
            },
            chunk: 512,
            replay: true,
        }
    }

    /// Sets the sampler of tokens.
    #[must_use]
    pub fn with_sampler(mut self, sampler: Sampler) -> Self {
        self.sampler = sampler;
        self
    }

    /// Sets the maximum number of tokens after a prompt.
    #[must_use]
    pub fn with_max_new(mut self, tokens: usize) -> Self {
        self.stops.max_new = tokens;
        self
    }

    /// Sets the tokens that end a text.
    #[must_use]
    pub fn with_stop(mut self, tokens: &[u32]) -> Self {
        self.stops.tokens = tokens.to_vec();
        self
    }

    /// Sets the sequences of new tokens that end a text.
    #[must_use]
    pub fn with_stop_sequences<S: AsRef<[u32]>>(mut self, sequences: &[S]) -> Self {
        let sequences = sequences.iter().map(|tokens| tokens.as_ref().to_vec());
        self.stops.sequences = sequences.collect();
        self
    }

    /// Sets the maximum number of prompt tokens read at once. A chunk is computed like a training sequence: it takes
    /// as much memory, and short chunks take longer.
    #[must_use]
    pub fn with_chunk(mut self, tokens: usize) -> Self {
        self.chunk = tokens;
        self
    }

    /// Turns off, or on again, the recording of single-token steps in a device graph that is replayed. It needs a
    /// device with graphs (CUDA), a model that [supports it](LanguageModel::replays_up_to) and caches with a window
    /// in every layer; other steps are launched. The tokens are the same. A text that ends and leaves the batch
    /// causes a new recording. While a step is recorded no other thread may use the device: CUDA refuses its calls,
    /// and either thread may get the error. Default: on.
    #[must_use]
    pub fn with_replay(mut self, replay: bool) -> Self {
        self.replay = replay;
        self
    }
}

impl<M: LanguageModel + ?Sized> Generator<'_, M> {
    /// Generates a text after each prompt.
    ///
    /// # Panics
    ///
    /// If [`try_generate`](Self::try_generate) returns an error, with that error's text.
    #[must_use]
    pub fn generate<P: AsRef<[u32]>>(&self, prompts: &[P]) -> Vec<Generated> {
        expect(self.try_generate(prompts))
    }

    /// Like [`generate`](Self::generate), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_stream`](Self::try_stream).
    pub fn try_generate<P: AsRef<[u32]>>(
        &self,
        prompts: &[P],
    ) -> Result<Vec<Generated>, GenerateError> {
        self.try_stream(prompts, |_| ControlFlow::Continue(()))
    }

    /// Generates a text after each prompt; `on_event` gets each token as soon as it is written, in the order of the
    /// prompts. [`ControlFlow::Break`] ends the token's text.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] before anything is computed, if a setting is out of its range, a prompt is empty, has a
    /// token outside the vocabulary, or would exceed the model's maximum length with its new tokens; later, if a
    /// logit is NaN or +∞, every logit of a row is −∞, the model refuses its input (for example because autodiff
    /// tracks its parameters), or the device fails.
    pub fn try_stream<P: AsRef<[u32]>>(
        &self,
        prompts: &[P],
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Vec<Generated>, GenerateError> {
        self.check(prompts)?;
        let mut texts = Texts::new(prompts);
        if texts.active.is_empty() || self.stops.max_new == 0 {
            return Ok(texts.finish());
        }
        let (batch, mut logits) = Batch::prefill(self.model, prompts, self.chunk)?;
        let mut steps = Steps::new(batch, self.chunk, self.replay);
        loop {
            let (laws, count) = (Laws::read(logits, &self.sampler)?, texts.active.len());
            let kept = self.write(&laws, &mut texts, &mut on_event)?;
            if kept.is_empty() {
                return Ok(texts.finish());
            }
            let known = match laws {
                Laws::Best(_, best) if kept.len() == count => Some(*best),
                _ => None,
            };
            if kept.len() < count {
                steps.keep(&kept)?;
            }
            let active: Vec<&[u32]> = texts.active.iter().map(|text| &text.text[..]).collect();
            logits = steps.read(&active, known)?;
        }
    }

    /// Writes a token to each active text, and returns the rows that continue.
    pub(super) fn write(
        &self,
        laws: &Laws,
        texts: &mut Texts,
        on_event: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Vec<usize>, GenerateError> {
        // All before the first is written, so that an error precedes the events.
        let mut tokens = Vec::new();
        for (row, writing) in texts.active.iter().enumerate() {
            let law = laws.law(row, &self.sampler, &writing.text, &[]);
            let law = law.map_err(|source| writing.failed(0, source))?;
            let unit = self.sampler.unit(writing.draw(0, Purpose::Token));
            tokens.push(vec![law.at(unit)]);
        }
        Ok(texts.push(&tokens, &self.stops, on_event))
    }

    pub(super) fn check<P: AsRef<[u32]>>(&self, prompts: &[P]) -> Result<(), GenerateError> {
        self.sampler.try_check().map_err(GenerateError::Sampler)?;
        if self.chunk == 0 {
            return Err(GenerateError::Zero("the chunk"));
        }
        let vocabulary = self.model.vocabulary();
        check_tokens(&self.stops.tokens, vocabulary, |_| TokenPlace::Stop)?;
        for (index, stop) in self.stops.sequences.iter().enumerate() {
            if stop.is_empty() {
                return Err(GenerateError::EmptyStop { index });
            }
            check_tokens(stop, vocabulary, |_| TokenPlace::StopSequence { index })?;
        }
        for (sequence, prompt) in prompts.iter().enumerate() {
            let prompt = prompt.as_ref();
            if prompt.is_empty() {
                return Err(GenerateError::EmptyPrompt { sequence });
            }
            let place = |position| TokenPlace::Prompt { sequence, position };
            check_tokens(prompt, vocabulary, place)?;
        }
        check_lengths(self.model.max_len(), "model", prompts, self.stops.max_new)
    }
}

pub(super) struct Texts {
    pub(super) active: Vec<Writing>,
    ended: Vec<Option<Generated>>,
}

impl Texts {
    pub(super) fn new<P: AsRef<[u32]>>(prompts: &[P]) -> Self {
        let writing = |(index, prompt): (usize, &P)| Writing::new(index, prompt.as_ref());
        let active: Vec<Writing> = prompts.iter().enumerate().map(writing).collect();
        Self {
            ended: vec![None; active.len()],
            active,
        }
    }

    /// Writes the tokens of each row, up to one that ends its text, and returns the rows that continue.
    pub(super) fn push(
        &mut self,
        tokens: &[Vec<u32>],
        stops: &Stops,
        on_event: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Vec<usize> {
        let mut kept = Vec::new();
        let mut active = Vec::new();
        for ((row, mut writing), tokens) in self.active.drain(..).enumerate().zip(tokens) {
            let mut push = |&token: &u32| writing.push(token, stops, on_event);
            match tokens.iter().find_map(&mut push) {
                Some(ended) => {
                    let sequence = writing.sequence;
                    self.ended[sequence] = Some(writing.finish(ended));
                }
                None => {
                    kept.push(row);
                    active.push(writing);
                }
            }
        }
        self.active = active;
        kept
    }

    /// Texts by prompt. Those still active have no token: none was requested.
    pub(super) fn finish(mut self) -> Vec<Generated> {
        for writing in self.active {
            let sequence = writing.sequence;
            self.ended[sequence] = Some(writing.finish(Ended::Length));
        }
        let ended = self.ended.into_iter().collect::<Option<_>>();
        ended.expect("every text has ended")
    }
}

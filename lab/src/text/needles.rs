//! Running text with facts in it, and questions about them.
//!
//! A fact stands anywhere in the text, questions after it:
//!
//! ```text
//! ..rest of the sentence.            ..rest of another one.
//! H is 40917.                        Answer: H is 40917.
//! It was not until..                 Nobody had..
//! ```
//!
//! A training text has one or more facts, and always the same number of questions. A prompt ends with the only
//! question of its text.
//!
//! A model must learn to copy before anything can be compared, and does so after a plateau on which it guesses the
//! digits. The plateau is shortened by names of one byte, short sentences, many questions, and some texts with a
//! single fact.

use super::Batch;
use super::windows::Windows;
use crate::rng::Rng;
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Digits of an answer.
pub const DIGITS: usize = 5;

/// Bytes of a training text per question.
const BYTES_PER_QUESTION: usize = 64;

/// Needles of a prompt, one of which is asked for.
const NEEDLES: usize = 4;

/// Seed of texts that are not trained on, the same for all runs. Training takes the seeds from 0 on.
const EVALUATION_SEED: u64 = u64::MAX;

/// Batches to validate with during training.
const WATCHED: usize = 4;

/// Names of numbers: a byte each, so that a model need not learn first to assemble a word from its letters.
const NAMES: &[u8; 26] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// Subject of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The pass key, the only fact of a prompt.
    Passkey,
    /// The number of a letter, among those of others.
    Needle,
}

impl Kind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Passkey, Self::Needle];
}

/// A fact and the question about it.
#[derive(Clone, Debug)]
struct Fact {
    kind: Kind,
    name: char,
    digits: String,
}

impl Fact {
    /// One fact of each requested kind, with different letters.
    fn draw(kinds: &[Kind], random: &mut Rng) -> Vec<Self> {
        let mut names = *NAMES;
        let mut fact = |(index, &kind): (usize, &Kind)| {
            names.swap(index, index + random.below(NAMES.len() - index));
            let digits = (0..DIGITS).map(|_| char::from(b'0' + random.below(10) as u8));
            Self {
                kind,
                name: char::from(names[index]),
                digits: digits.collect(),
            }
        };
        kinds.iter().enumerate().map(&mut fact).collect()
    }

    fn subject(&self) -> String {
        match self.kind {
            Kind::Passkey => "The key".into(),
            Kind::Needle => self.name.into(),
        }
    }

    /// Text before the digits in the fact.
    fn told(&self) -> String {
        format!("\n{} is ", self.subject())
    }

    /// Text before the digits in the question.
    fn asked(&self) -> String {
        format!("\nAnswer: {} is ", self.subject())
    }

    /// Bytes of the fact's sentence.
    fn told_len(&self) -> usize {
        self.told().len() + DIGITS + END.len()
    }
}

/// Text after digits.
const END: &str = ".\n";

/// A question of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Kind of the fact.
    pub kind: Kind,
    /// Digits in the fact.
    pub told: Range<usize>,
    /// The digits of the answer.
    pub answer: Range<usize>,
}

/// A training text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lesson {
    /// The text.
    pub bytes: Vec<u8>,
    /// Its questions, in order.
    pub questions: Vec<Question>,
}

/// A text that ends with a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The text.
    pub bytes: Vec<u8>,
    /// Digits in the fact.
    pub told: Range<usize>,
    /// The right answer.
    pub answer: Vec<u8>,
}

/// An insertion into the text.
#[derive(Clone, Copy, Debug)]
enum Insert {
    Fact(usize),
    Question(usize),
}

/// Texts with facts in them.
#[derive(Debug)]
pub struct Needles<'a> {
    windows: Windows<'a>,
    tokens: usize,
}

impl<'a> Needles<'a> {
    /// Texts of `tokens` bytes from a corpus whose windows have at least 8 times as many.
    pub fn new(windows: Windows<'a>, tokens: usize) -> Self {
        Self { windows, tokens }
    }

    /// Number of questions of a training text, and maximum number of its facts.
    fn questions(&self) -> usize {
        (self.tokens / BYTES_PER_QUESTION).clamp(2, NAMES.len())
    }

    /// A training text: `tokens` bytes and the next one. One of its facts may be a passkey.
    fn lesson(&self, filler: impl FnOnce(usize, &mut Rng) -> &'a [u8], random: &mut Rng) -> Lesson {
        let questions = self.questions();
        let mut kinds = vec![Kind::Needle; 1 + random.below(questions)];
        kinds[0] = Kind::ALL[random.below(Kind::ALL.len())];
        let facts = Fact::draw(&kinds, random);
        let answered = |fact: &Fact| fact.asked().len() + DIGITS + END.len();
        let asked = || (0..questions).map(|question| question % facts.len());
        // A fact is told at its first occurrence, and asked for at the later ones.
        let mut order: Vec<usize> = (0..facts.len()).chain(asked()).collect();
        let told: usize = facts.iter().map(Fact::told_len).sum();
        let asked_for: usize = asked().map(|fact| answered(&facts[fact])).sum();
        let len = self.tokens + 1 - told - asked_for;
        let filler = filler(len, random);
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last + 1));
        }
        let mut cuts: Vec<usize> = order.iter().map(|_| random.below(len + 1)).collect();
        cuts.sort_unstable();
        let mut seen = vec![false; facts.len()];
        let insert = |fact| match std::mem::replace(&mut seen[fact], true) {
            false => Insert::Fact(fact),
            true => Insert::Question(fact),
        };
        let inserts = order.into_iter().map(insert);
        compose(filler, cuts.into_iter().zip(inserts), &facts)
    }

    /// Training text number `index` of a seed.
    pub fn training(&self, seed: u64, index: usize) -> Lesson {
        let filler = |len, random: &mut Rng| self.windows.training(len, random);
        self.lesson(filler, &mut Rng::new(seed, index as u64))
    }

    /// A validation text, made like those of training.
    fn validating(&self, index: usize) -> Lesson {
        let filler = |len, random: &mut Rng| self.windows.validating(len, random);
        self.lesson(filler, &mut Rng::new(EVALUATION_SEED, index as u64))
    }

    /// Prompt number `index` among those of `len` bytes with their answers, of a kind, whose fact stands at this
    /// share of the running text: the same for all runs.
    pub fn prompt(&self, len: usize, kind: Kind, depth: f64, index: usize) -> Prompt {
        let kinds: &[Kind] = match kind {
            Kind::Passkey => &[Kind::Passkey],
            Kind::Needle => &[Kind::Needle; NEEDLES],
        };
        // A stream for each prompt, far from those of validation.
        let stream = [len as u64, kind as u64, depth.to_bits(), index as u64];
        let stream = (stream.iter()).fold(1 << 40, |hash: u64, &part| {
            (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let random = &mut Rng::new(EVALUATION_SEED, stream);
        let facts = Fact::draw(kinds, random);
        let question = facts[0].asked();
        let told: usize = facts.iter().map(Fact::told_len).sum();
        let filler = len - DIGITS - question.len() - told;
        let mut inserts: Vec<(usize, Insert)> = (0..facts.len())
            .map(|fact| match fact {
                0 => ((depth * filler as f64).round() as usize, Insert::Fact(0)),
                other => (random.below(filler + 1), Insert::Fact(other)),
            })
            .collect();
        inserts.sort_by_key(|&(place, _)| place);
        inserts.push((filler, Insert::Question(0)));
        let filler = self.windows.validating(filler, random);
        let Lesson { bytes, questions } = compose(filler, inserts.into_iter(), &facts);
        let Question { told, answer, .. } = questions[0].clone();
        Prompt {
            told,
            answer: bytes[answer.clone()].to_vec(),
            bytes: bytes[..answer.start].to_vec(),
        }
    }

    fn batch_of(&self, lessons: &[Lesson], device: &Device) -> Batch {
        let texts: Vec<&[u8]> = lessons.iter().map(|lesson| &lesson.bytes[..]).collect();
        let mut answers = vec![0f32; lessons.len() * self.tokens];
        for (lesson, row) in lessons.iter().zip(answers.chunks_mut(self.tokens)) {
            for question in &lesson.questions {
                // The target at a position is the next byte.
                row[question.answer.start - 1..question.answer.end - 1].fill(1.0);
            }
        }
        let answers = TensorData::new(answers, [lessons.len(), self.tokens]);
        Batch {
            answers: Some(Tensor::from_data(answers, device)),
            ..Batch::new(&texts, device)
        }
    }

    /// Texts number `first..first + size` of a seed's training.
    pub fn batch(&self, seed: u64, [first, size]: [usize; 2], device: &Device) -> Batch {
        let lessons = (first..first + size).map(|item| self.training(seed, item));
        self.batch_of(&lessons.collect::<Vec<Lesson>>(), device)
    }

    /// Texts for validation during training, `size` at a time.
    pub fn validation(&self, size: usize, device: &Device) -> Vec<Batch> {
        let batch = |number| {
            let lesson = |item| self.validating(number * size + item);
            let lessons: Vec<Lesson> = (0..size).map(lesson).collect();
            self.batch_of(&lessons, device)
        };
        (0..WATCHED).map(batch).collect()
    }
}

/// Running text with inserts at ascending positions.
fn compose(
    filler: &[u8],
    inserts: impl Iterator<Item = (usize, Insert)>,
    facts: &[Fact],
) -> Lesson {
    let (mut bytes, mut questions, mut done) = (Vec::new(), Vec::new(), 0);
    let mut told = vec![0..0; facts.len()];
    for (place, insert) in inserts {
        bytes.extend_from_slice(&filler[done..place]);
        done = place;
        let mut say = |before: String, digits: &str, behind: &str| {
            bytes.extend_from_slice(before.as_bytes());
            let range = bytes.len()..bytes.len() + digits.len();
            bytes.extend_from_slice(digits.as_bytes());
            bytes.extend_from_slice(behind.as_bytes());
            range
        };
        match insert {
            Insert::Fact(index) => {
                let fact = &facts[index];
                told[index] = say(fact.told(), &fact.digits, END);
            }
            Insert::Question(index) => {
                let fact = &facts[index];
                questions.push(Question {
                    kind: fact.kind,
                    told: told[index].clone(),
                    answer: say(fact.asked(), &fact.digits, END),
                });
            }
        }
    }
    bytes.extend_from_slice(&filler[done..]);
    Lesson { bytes, questions }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::corpus::Corpus;
    use std::collections::BTreeSet;

    fn corpus() -> Corpus {
        Corpus {
            source: "letters".into(),
            bytes: (0..200_000u64).map(|n| b'a' + (n * n % 23) as u8).collect(),
        }
    }

    fn needles(corpus: &Corpus, tokens: usize) -> Needles<'_> {
        Needles::new(Windows::new(corpus, tokens, 8, 64).unwrap(), tokens)
    }

    #[test]
    fn every_fact_of_a_lesson_is_asked_for_behind_it_and_the_answer_is_right() {
        let corpus = corpus();
        for (tokens, questions) in [(256, 4), (2048, 26)] {
            let needles = needles(&corpus, tokens);
            let mut counts = BTreeSet::new();
            for index in 0..200 {
                let lesson = needles.training(3, index);
                assert_eq!(lesson.bytes.len(), tokens + 1);
                assert_eq!(lesson.questions.len(), questions);
                let told = lesson.questions.iter().map(|question| question.told.start);
                let facts = told.collect::<BTreeSet<_>>().len();
                counts.insert(facts);
                let digits = lesson.bytes.iter().filter(|byte| byte.is_ascii_digit());
                assert_eq!(digits.count(), (facts + questions) * DIGITS);
                for Question { told, answer, .. } in &lesson.questions {
                    assert!(told.end < answer.start);
                    assert_eq!(lesson.bytes[told.clone()], lesson.bytes[answer.clone()]);
                }
            }
            assert_eq!(counts, (1..=questions).collect());
        }
    }

    #[test]
    fn lessons_are_their_seed_and_number_alone() {
        let corpus = corpus();
        let needles = needles(&corpus, 256);
        assert_eq!(needles.training(1, 2), needles.training(1, 2));
        assert_ne!(needles.training(1, 2), needles.training(1, 3));
        assert_ne!(needles.training(1, 2), needles.training(2, 2));
    }

    #[test]
    fn a_prompt_has_its_length_with_the_answer_and_its_fact_at_its_depth() {
        let corpus = corpus();
        let needles = needles(&corpus, 256);
        for (kind, facts) in [(Kind::Passkey, 1), (Kind::Needle, NEEDLES)] {
            for depth in [0.0, 0.3, 0.9, 1.0] {
                for (index, len) in [256, 2048].into_iter().enumerate() {
                    let prompt = needles.prompt(len, kind, depth, index);
                    let (bytes, told) = (&prompt.bytes, prompt.told.clone());
                    assert_eq!(bytes.len() + DIGITS, len);
                    assert_eq!(bytes[told.clone()], prompt.answer[..]);
                    // The answer is not told again.
                    let digits = bytes.iter().filter(|byte| byte.is_ascii_digit());
                    assert_eq!(digits.count(), facts * DIGITS);
                    assert!(bytes.ends_with(b" is "));
                    let error = told.start as f64 / len as f64 - depth;
                    // Other facts and the question take up to 200 bytes.
                    assert!(error.abs() < 210.0 / len as f64, "{kind:?} {depth} {error}");
                    assert_eq!(prompt, needles.prompt(len, kind, depth, index));
                }
            }
        }
    }
}

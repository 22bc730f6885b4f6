//! The task: pairs of a key and a value among fillers, and later questions that name a key and ask for its value.
//!
//! Each pair is asked once. A token is a number: keys come first, then values, then fillers, so a token's kind tells
//! a model whether it matters, unless the pairs are [marked](Layout::Marked); nobody can know in advance which pair a
//! question asks for.

use crate::rng::Rng;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Number of tokens per pair.
const TOKENS_PER_PAIR: usize = 16;

/// Positions of the pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Among fillers in the first two thirds of a text; questions among fillers in the last third.
    #[default]
    Scattered,
    /// Zoology's: all pairs first, questions anywhere after them. Keeping the first keys is enough, so this layout
    /// does not show that anything has been learned. (The positions of the questions are uniform here; Zoology draws
    /// them from a power law.)
    PairsFirst,
    /// Sentences of a mark, a key and a value in the first two thirds of a text, about two in seven of which have the
    /// mark of a pair; questions among keys and values in the last third. The same tokens are a pair in one sentence
    /// and filler in another, even in one text, so no kind of token is worth keeping by itself.
    Marked,
}

/// The sizes of the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pairs {
    /// Tokens per text.
    pub tokens: usize,
    /// Pairs per text, and questions.
    pub pairs: usize,
    /// Different keys, and as many values.
    pub kinds: usize,
    /// Positions of the pairs.
    pub layout: Layout,
}

/// A text on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The tokens.
    pub tokens: Vec<usize>,
    /// In the order of the questions.
    pub questions: Vec<Question>,
}

/// A question and the fact that answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Position of the question.
    pub at: usize,
    /// Position of the requested value; its key is one position before.
    pub fact: usize,
    /// Number of the value, below [`Pairs::kinds`].
    pub answer: usize,
}

/// Texts of a batch.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The texts on the host.
    pub texts: Vec<Text>,
    /// `[batch, tokens]`.
    pub tokens: Tensor<2, Int>,
    /// Rows of the questions among all `batch * tokens` tokens, `[batch * pairs]`.
    pub rows: Tensor<1, Int>,
    /// Requested values, `[batch * pairs]`, below [`Pairs::kinds`].
    pub answers: Tensor<1, Int>,
}

impl Pairs {
    /// The task at a length: one pair per 16 tokens, and four times as many different keys, which makes guessing
    /// useless, but at most 128 as long as that is twice the pairs. A small vocabulary is learned in few steps.
    pub fn new(tokens: usize, layout: Layout) -> Self {
        let pairs = tokens / TOKENS_PER_PAIR;
        Self {
            tokens,
            pairs,
            kinds: (4 * pairs).min(128.max(2 * pairs)),
            layout,
        }
    }

    /// Texts that are `divisor` times shorter, with as many kinds of tokens.
    pub fn shortened(self, divisor: usize) -> Self {
        Self {
            tokens: self.tokens / divisor,
            pairs: self.pairs / divisor,
            ..self
        }
    }

    /// Different tokens: keys, values, and twice as many fillers as keys.
    pub fn vocabulary(&self) -> usize {
        4 * self.kinds
    }

    /// First tokens of [marked](Layout::Marked) sentences: with a pair, and without.
    fn marks(&self) -> [usize; 2] {
        [2 * self.kinds, 2 * self.kinds + 1]
    }

    /// Draws a text.
    pub fn draw(&self, random: &mut Rng) -> Text {
        let (tokens, pairs, kinds) = (self.tokens, self.pairs, self.kinds);
        let filler = match self.layout {
            Layout::Marked => 0,
            Layout::Scattered | Layout::PairsFirst => 2 * kinds,
        };
        let mut text: Vec<usize> = (0..tokens)
            .map(|_| filler + random.below(2 * kinds))
            .collect();
        let told = 2 * tokens / 3;
        // Positions of the pairs' values, and of the first possible question.
        let (facts, begin): (Vec<usize>, usize) = match self.layout {
            Layout::Scattered => {
                let places = distinct(pairs, told / 2, random).into_iter();
                (places.map(|place| 2 * place + 1).collect(), told)
            }
            Layout::PairsFirst => ((0..pairs).map(|place| 2 * place + 1).collect(), 2 * pairs),
            Layout::Marked => {
                let [pair, no_pair] = self.marks();
                for sentence in text[..told].chunks_exact_mut(3) {
                    let (key, value) = (random.below(kinds), kinds + random.below(kinds));
                    sentence.copy_from_slice(&[no_pair, key, value]);
                }
                let places = distinct(pairs, told / 3, random);
                places.iter().for_each(|place| text[3 * place] = pair);
                let values = places.into_iter().map(|place| 3 * place + 2);
                (values.collect(), told)
            }
        };
        let asked = distinct(pairs, tokens - begin, random);
        let mut questions = Vec::with_capacity(pairs);
        let keys = distinct(pairs, kinds, random);
        for ((fact, asked), key) in facts.into_iter().zip(asked).zip(keys) {
            let answer = random.below(kinds);
            let at = begin + asked;
            text[fact - 1] = key;
            text[fact] = kinds + answer;
            text[at] = key;
            questions.push(Question { at, fact, answer });
        }
        questions.sort_unstable_by_key(|question| question.at);
        Text {
            tokens: text,
            questions,
        }
    }

    /// The batch number `index` of a seed, the same on every device and for every model.
    pub fn batch(&self, size: usize, seed: u64, index: usize, device: &Device) -> Batch {
        let mut random = Rng::new(seed, index as u64);
        let texts: Vec<Text> = (0..size).map(|_| self.draw(&mut random)).collect();
        let all = |number: fn(usize, &Question, usize) -> usize| {
            let questions = texts.iter().enumerate().flat_map(|(text, drawn)| {
                (drawn.questions.iter()).map(move |question| number(text, question, self.tokens))
            });
            ints(questions, [size * self.pairs], device)
        };
        let tokens = texts.iter().flat_map(|text| text.tokens.iter().copied());
        Batch {
            tokens: ints(tokens, [size, self.tokens], device),
            rows: all(|text, question, tokens| text * tokens + question.at),
            answers: all(|_, question, _| question.answer),
            texts,
        }
    }
}

/// An i32 tensor of these numbers.
pub fn ints<const D: usize>(
    numbers: impl Iterator<Item = usize>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    let numbers: Vec<i32> = numbers.map(|number| number as i32).collect();
    Tensor::from_data(TensorData::new(numbers, shape), (device, DType::I32))
}

/// `count` different numbers below `bound`, in random order.
fn distinct(count: usize, bound: usize, random: &mut Rng) -> Vec<usize> {
    let mut all: Vec<usize> = (0..bound).collect();
    for i in 0..count {
        let j = i + random.below(bound - i);
        all.swap(i, j);
    }
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUTS: [Layout; 2] = [Layout::Scattered, Layout::PairsFirst];

    #[test]
    fn every_pair_is_asked_once_and_the_answer_stands_behind_its_key() {
        for (layout, tokens) in LAYOUTS.into_iter().flat_map(|l| [(l, 64), (l, 4096)]) {
            let task = Pairs::new(tokens, layout);
            let kinds = task.kinds;
            let text = task.draw(&mut Rng::new(1, 2));
            assert_eq!(text.questions.len(), task.pairs);
            let mut keys = vec![0; kinds];
            for &key in text.tokens.iter().filter(|&&token| token < kinds) {
                keys[key] += 1;
            }
            assert_eq!(keys.iter().filter(|&&n| n == 2).count(), task.pairs);
            assert_eq!(keys.iter().sum::<usize>(), 2 * task.pairs);
            for question in &text.questions {
                assert!(question.fact < question.at);
                assert_eq!(text.tokens[question.fact - 1], text.tokens[question.at]);
                assert_eq!(text.tokens[question.fact], kinds + question.answer);
            }
            assert!(text.tokens.iter().all(|&token| token < task.vocabulary()));
        }
    }

    /// Only the mark identifies a pair's sentence: elsewhere the same keys and values are filler.
    #[test]
    fn marked_sentences_are_the_pairs() {
        let task = Pairs::new(512, Layout::Marked);
        let [pair, no_pair] = task.marks();
        let told = 2 * task.tokens / 3;
        let mut kinds_of_both = 0;
        for index in 0..10 {
            let text = task.draw(&mut Rng::new(3, index));
            let sentences = || text.tokens[..told].chunks_exact(3);
            let marked = sentences().enumerate().filter(|(_, of)| of[0] == pair);
            let mut facts: Vec<usize> = text.questions.iter().map(|of| of.fact).collect();
            facts.sort_unstable();
            assert!(marked.map(|(place, _)| 3 * place + 2).eq(facts));
            for question in &text.questions {
                assert!(question.fact < told && question.at >= told);
                assert_eq!(text.tokens[question.fact - 1], text.tokens[question.at]);
                assert_eq!(text.tokens[question.fact], task.kinds + question.answer);
                let key = text.tokens[question.at];
                let filler = sentences().filter(|of| of[0] == no_pair && of[1] == key);
                kinds_of_both += usize::from(filler.count() > 0);
            }
            assert!(text.tokens[told..].iter().all(|&token| token < pair));
        }
        // Out of 320 keys of pairs.
        assert!(kinds_of_both > 100, "{kinds_of_both}");
    }

    #[test]
    fn a_short_text_has_the_tokens_of_a_long_one() {
        let long = Pairs::new(4096, Layout::Scattered);
        let short = long.shortened(64);
        assert_eq!((short.tokens, short.pairs), (64, 4));
        assert_eq!(short.vocabulary(), long.vocabulary());
        assert_eq!(long.shortened(1), long);
    }

    #[test]
    fn scattered_pairs_leave_the_last_third_to_the_questions() {
        let task = Pairs::new(96, Layout::Scattered);
        for index in 0..20 {
            let text = task.draw(&mut Rng::new(3, index));
            assert!(text.questions.iter().all(|q| q.fact < 64 && q.at >= 64));
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_batch_is_its_seed_and_number_alone() {
        let task = Pairs::new(64, Layout::Scattered);
        let draw = |seed, index| task.batch(3, seed, index, &Device::flex()).texts;
        assert_eq!(draw(5, 1), draw(5, 1));
        assert_ne!(draw(5, 1), draw(5, 2));
        assert_ne!(draw(5, 1), draw(6, 1));
    }

    #[cfg(feature = "flex")]
    #[test]
    fn rows_are_those_of_the_questions() {
        let task = Pairs::new(64, Layout::PairsFirst);
        let batch = task.batch(2, 0, 0, &Device::flex());
        let tokens: Vec<i32> = batch.tokens.into_data().iter().collect();
        let rows: Vec<i32> = batch.rows.into_data().iter().collect();
        let questions = (batch.texts.iter()).flat_map(|t| t.questions.iter().map(move |q| (t, q)));
        for (row, (text, question)) in rows.into_iter().zip(questions) {
            assert_eq!(tokens[row as usize], text.tokens[question.at] as i32);
        }
    }
}

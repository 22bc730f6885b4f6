//! The task: some tokens of a long text are facts, most are distractors, and the text ends with questions about the
//! facts.

use burn::tensor::{Device, Int, Tensor, TensorData};

// ANCHOR: task
/// Tokens of a text.
pub const LENGTH: usize = 128;
/// Facts of a text, and questions at its end: one about each fact.
pub const FACTS: usize = 8;
/// Subjects of facts; as many others occur only in distractors.
pub const SUBJECTS: usize = 16;
/// Values that a token may give its subject; one more number stands for "what?".
pub const VALUES: usize = 16;

/// Texts and their right answers. A token is a pair of numbers: a subject and a value.
#[derive(Clone, Debug)]
pub struct Texts {
    /// `[batch, LENGTH]`: facts have subjects below `SUBJECTS`, distractors from there on.
    pub subjects: Tensor<2, Int>,
    /// `[batch, LENGTH]`: `VALUES` in a question.
    pub values: Tensor<2, Int>,
    /// `[batch * FACTS]`: the value that answers each question.
    pub answers: Tensor<1, Int>,
    /// Positions of the facts of each text.
    pub places: Vec<Vec<usize>>,
}
// ANCHOR_END: task

/// A small generator of pseudo-random numbers (SplitMix64): the same texts on every machine.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }

    /// `count` different numbers below `bound`, in random order.
    fn distinct(&mut self, count: usize, bound: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..bound).collect();
        for i in 0..count {
            let j = i + self.below(bound - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}

impl Texts {
    /// Draws `batch` texts.
    pub fn draw(batch: usize, random: &mut Random, device: &Device) -> Self {
        let (mut subjects, mut values) = (Vec::new(), Vec::new());
        let (mut answers, mut places) = (Vec::new(), Vec::new());
        for _ in 0..batch {
            let told = LENGTH - FACTS;
            let mut text: Vec<(usize, usize)> = (0..told)
                .map(|_| (SUBJECTS + random.below(SUBJECTS), random.below(VALUES)))
                .collect();
            let at = random.distinct(FACTS, told);
            for (&place, subject) in at.iter().zip(random.distinct(FACTS, SUBJECTS)) {
                text[place].0 = subject;
            }
            for question in random.distinct(FACTS, FACTS) {
                let (subject, value) = text[at[question]];
                text.push((subject, VALUES));
                answers.push(value as i32);
            }
            subjects.extend(text.iter().map(|token| token.0 as i32));
            values.extend(text.iter().map(|token| token.1 as i32));
            places.push(at);
        }
        let tokens = |data| Tensor::from_data(TensorData::new(data, [batch, LENGTH]), device);
        Self {
            subjects: tokens(subjects),
            values: tokens(values),
            answers: Tensor::from_data(TensorData::new(answers, [batch * FACTS]), device),
            places,
        }
    }
}

//! Random calls of generation and sampling, with extreme settings: every refusal is an error.

use crate::generate::model::{Model, VOCABULARY, go_on};
use flash_dma_models::generate::{
    Beams, EarlyStopping, Generator, ModelDraft, PromptLookup, Sampler,
};
use std::fmt::Debug;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Cases of a run, one call each.
const CASES: u64 = 1_200;

/// The random choices of one case.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A valid setting, or once in eight an extreme one.
    fn number(&mut self, usual: &[f64]) -> f64 {
        let ends = [0.0, -1.0, 1e-320, 1e300, f64::NAN, f64::INFINITY];
        match self.below(8) {
            0 => self.pick(&ends),
            _ => self.pick(usual),
        }
    }

    fn count(&mut self) -> usize {
        self.pick(&[0, 1, 1, 2, 2, 3, 5, usize::MAX])
    }

    /// Tokens, rarely none or an invalid one.
    fn tokens(&mut self) -> Vec<u32> {
        let len = self.pick(&[0, 1, 2, 3, 5, 20, 20, 40, 300]);
        let token = |draw: &mut Self| match draw.below(2000) {
            0 => draw.pick(&[VOCABULARY as u32, u32::MAX]),
            _ => draw.below(VOCABULARY) as u32,
        };
        (0..len).map(|_| token(self)).collect()
    }

    fn logits(&mut self) -> Vec<f32> {
        let finite = [f32::MAX, f32::MIN, 0.0, -3.0, 2.0];
        let rare = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let logit = |draw: &mut Self| match draw.below(16) {
            0 => draw.pick(&rare),
            _ => draw.pick(&finite),
        };
        (0..self.pick(&[0, 1, 3, 9])).map(|_| logit(self)).collect()
    }

    fn sampler(&mut self) -> Sampler {
        let mut sampler = match self.below(2) {
            0 => Sampler::greedy(),
            _ => Sampler::random(7).with_temperature(self.number(&[0.5, 1.0])),
        };
        if self.below(3) == 0 {
            sampler = sampler.with_top_k(self.count());
        }
        if self.below(3) == 0 {
            sampler = sampler.with_top_p(self.number(&[0.1, 0.9, 1.0]));
        }
        if self.below(3) == 0 {
            sampler = sampler.with_min_p(self.number(&[0.1, 0.5, 1.0]));
        }
        if self.below(3) == 0 {
            sampler = sampler.with_repetition_penalty(self.number(&[0.8, 1.2]));
        }
        sampler
    }

    fn beams(&mut self) -> Beams {
        use EarlyStopping::{Heuristic, WhenFull, WhenHopeless};

        // More beams than texts keep all texts, whose number grows with each token.
        let mut beams = Beams::new(self.pick(&[0, 1, 2, 3, 3, 5]));
        if self.below(2) == 0 {
            beams = beams.with_length_penalty(self.number(&[0.0, 1.0, 2.0]));
        }
        if self.below(2) == 0 {
            beams = beams.with_returned(self.count());
        }
        let rule = self.pick(&[Heuristic, WhenFull, WhenHopeless]);
        beams.with_early_stopping(rule)
    }
}

/// True for a result, false for an error, which must have a text.
fn said<T, E: Debug + std::fmt::Display>(result: Result<T, E>) -> bool {
    result.map_err(|error| error.to_string()).is_ok()
}

#[test]
fn no_call_of_generation_panics() {
    let (model, other) = (Model::new(1), Model::new(2));
    let mut taken = [[0; 2]; 6];
    for case in 0..CASES {
        let mut draw = Draw(case);
        let sampler = draw.sampler();
        let count = draw.pick(&[0, 1, 1, 2, 3]);
        let prompts: Vec<Vec<u32>> = (0..count).map(|_| draw.tokens()).collect();
        let (max_new, chunk) = (draw.pick(&[0, 1, 4, 4, 9, usize::MAX]), draw.count());
        let stops =
            [draw.tokens(), draw.tokens()].map(|tokens| tokens[..tokens.len().min(2)].to_vec());
        let description =
            format!("case {case}: {sampler:?}, {prompts:?}, {max_new}, {chunk}, {stops:?}");
        let beams = draw.beams();
        let (ngram, count) = (draw.count(), draw.count());
        let generator = Generator::new(&model)
            .with_sampler(sampler)
            .with_max_new(max_new)
            .with_chunk(chunk)
            .with_stop(&stops[0])
            .with_stop_sequences(&stops[1..]);
        let kind = draw.below(6);
        let call = || match kind {
            0 => said(generator.try_generate(&prompts)),
            1 => said(
                generator.try_stream(&prompts, |event| match event.token % 7 {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }),
            ),
            2 => {
                let prompt = prompts.first().cloned().unwrap_or_default();
                said(generator.try_beams(&prompt, &beams))
            }
            3 => {
                let mut draft = PromptLookup::new(ngram, count);
                said(generator.try_speculate(&prompts, &mut draft, go_on))
            }
            4 => {
                let mut draft = ModelDraft::new(&other, count);
                said(generator.try_speculate(&prompts, &mut draft, go_on))
            }
            _ => {
                let logits = draw.logits();
                said(sampler.try_check())
                    & said(sampler.try_distribution(&logits, &[0, 2, u32::MAX]))
            }
        };
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(took) => taken[kind][usize::from(took)] += 1,
            Err(_) => panic!("kind {kind}, {beams:?}, {ngram}, {count}, {description}"),
        }
    }
    // Each kind of call is accepted and refused often, or the cases show nothing.
    let enough = taken.as_flattened().iter().all(|&count| count > 10);
    assert!(enough, "{taken:?}");
}

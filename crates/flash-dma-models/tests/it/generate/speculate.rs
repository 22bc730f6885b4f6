//! Speculative decoding: greedy texts token for token, and the contents of the caches.

use crate::generate::model::{Model, VOCABULARY, Watched, prompt};
use flash_dma_models::generate::{
    Draft, DraftLimits, DraftRow, Ended, GenerateError, Generated, Generator, ModelDraft,
    PromptLookup, Proposal, Sampler,
};
use std::ops::ControlFlow;

fn prompts() -> Vec<Vec<u32>> {
    vec![prompt(23, 0), prompt(5, 1), prompt(40, 2)]
}

/// Proposes known texts.
struct Scripted<'t> {
    count: usize,
    texts: &'t [Vec<u32>],
    /// A token is wrong where the sum of sequence and position has this divisor.
    wrong: usize,
}

/// Divides no such sum in the tests except that of the first token, which is not proposed.
const NEVER: usize = 1000;

impl<'t> Scripted<'t> {
    fn new(count: usize, texts: &'t [Vec<u32>], wrong: usize) -> Self {
        Self {
            count,
            texts,
            wrong,
        }
    }
}

impl Draft for Scripted<'_> {
    fn count(&self) -> usize {
        self.count
    }

    fn try_propose(
        &mut self,
        rows: &[DraftRow<'_>],
        count: usize,
        _: &Sampler,
    ) -> Result<Vec<Proposal>, GenerateError> {
        let propose = |row: &DraftRow<'_>| {
            let text = self.texts[row.sequence].iter().enumerate();
            let text = text.skip(row.written).take(count);
            let tokens = text.map(|(place, &token)| {
                let wrong = (row.sequence + place).is_multiple_of(self.wrong);
                (token + u32::from(wrong)) % VOCABULARY as u32
            });
            Proposal::certain(&tokens.collect::<Vec<_>>())
        };
        Ok(rows.iter().map(propose).collect())
    }
}

fn tokens(texts: &[Generated]) -> Vec<Vec<u32>> {
    texts.iter().map(|text| text.tokens.clone()).collect()
}

#[test]
fn a_greedy_text_is_that_of_the_model_whatever_is_proposed() {
    let (model, other) = (Model::new(3), Model::new(4));
    let generator = Generator::new(&model).with_max_new(40).with_chunk(16);
    let alone = generator.generate(&prompts());
    // 20 tokens and one are more than a decode step.
    for count in [1, 2, 5, 15, 20] {
        for batch in [&prompts()[..1], &prompts()] {
            let alone = &alone[..batch.len()];
            let written = generator.speculate(batch, &mut ModelDraft::new(&other, count));
            assert_eq!(written.texts, alone, "{count} by another model");
            let texts = tokens(alone);
            for wrong in [1, 2, 3, 7, NEVER] {
                let mut draft = Scripted::new(count, &texts, wrong);
                let written = generator.speculate(batch, &mut draft);
                assert_eq!(written.texts, alone, "{count}, wrong every {wrong}");
            }
        }
    }
}

#[test]
fn steps_and_accepted_tokens_are_counted() {
    let model = Watched::new(Model::new(3));
    let generator = Generator::new(&model).with_max_new(21);
    let one = &prompts()[..1];
    let texts = tokens(&generator.generate(one));
    model.reads();
    let report = |wrong| {
        let mut draft = Scripted::new(4, &texts, wrong);
        generator.speculate(one, &mut draft).report
    };
    // The prompt gives one token, and each step five.
    let right = report(NEVER);
    assert_eq!((right.steps, right.written), (4, 20));
    assert_eq!((right.proposed, right.accepted), (16, 16));
    assert_eq!(right.acceptance_rate(), 1.0);
    let lengths: Vec<usize> = model.reads().iter().map(|read| read.len).collect();
    assert_eq!(lengths, [23, 5, 5, 5, 5]);
    // One token a step. The last four steps may propose fewer: 3, 2, 1 and none.
    let wrong = report(1);
    assert_eq!((wrong.steps, wrong.accepted, wrong.written), (20, 0, 20));
    assert_eq!(wrong.proposed, 16 * 4 + 3 + 2 + 1);
    assert_eq!(wrong.acceptance_rate(), 0.0);
    // The positions 3, 6, 9, … are wrong: from 1 on, two are accepted and the third is replaced, over and over.
    let some = report(3);
    assert_eq!((some.steps, some.written), (7, 20));
}

#[test]
fn a_model_accepts_its_own_proposals() {
    let model = Model::new(3);
    let drawn = Sampler::random(8).with_temperature(3.0).with_top_p(0.9);
    for sampler in [Sampler::greedy(), drawn] {
        let generator = Generator::new(&model).with_max_new(31);
        let generator = generator.with_sampler(sampler);
        let written = generator.speculate(&prompts(), &mut ModelDraft::new(&model, 5));
        // Up to the rounding of the two distributions, which wrong contents of the caches would exceed by far.
        let report = written.report;
        assert_eq!(report.acceptance_rate(), 1.0, "{report:?}");
        assert_eq!((report.steps, report.written), (5, 3 * 30));
    }
}

#[test]
fn a_draft_forgets_what_was_not_accepted() {
    let model = Model::new(4);
    let limits = DraftLimits {
        chunk: 16,
        max_new: 30,
    };
    let greedy = Sampler::greedy();
    let propose = |draft: &mut ModelDraft<'_, Model>, text: &[u32]| {
        let row = DraftRow {
            sequence: 0,
            text,
            written: 1,
        };
        let proposals = draft.try_propose(&[row], 6, &greedy).unwrap();
        proposals[0].tokens().to_vec()
    };
    let mut text = prompt(30, 0);
    let mut draft = ModelDraft::new(&model, 6);
    draft.try_begin(&[&text], limits).unwrap();
    // Each time another number of proposals is kept, followed by a token that was not proposed.
    for kept in [0, 5, 2, 6, 1] {
        text.push(9);
        let proposed = propose(&mut draft, &text);
        let mut fresh = ModelDraft::new(&model, 6);
        fresh.try_begin(&[&text[..20]], limits).unwrap();
        assert_eq!(propose(&mut fresh, &text), proposed, "{kept}");
        assert_eq!(proposed, model.greedy(&text, 6));
        text.extend(&proposed[..kept]);
    }
}

#[test]
fn a_lookup_finds_what_repeats() {
    let model = Model::new(3);
    // A random model soon repeats itself.
    let generator = Generator::new(&model).with_max_new(120);
    let repeated = [prompt(7, 5).repeat(4)];
    let alone = generator.generate(&repeated);
    let written = generator.speculate(&repeated, &mut PromptLookup::new(3, 6));
    assert_eq!(written.texts, alone);
    let report = written.report;
    assert!(report.accepted > 0 && report.steps < 119, "{report:?}");
    assert_eq!(report.written, 119);
}

/// A model, sixteen tokens of two texts by it, and the position, 2 to 4, of a token in the first text that occurs
/// nowhere else before the end of either.
fn texts_with_a_stop() -> (Model, Vec<Vec<u32>>, usize) {
    let found = (3..40).find_map(|seed| {
        let model = Model::new(seed);
        let generator = Generator::new(&model).with_max_new(16);
        let texts = tokens(&generator.generate(&prompts()[..2]));
        let stops = |&at: &usize| {
            let stop = texts[0][at];
            !texts[0][..at].contains(&stop) && !texts[1].contains(&stop)
        };
        let at = (2..5).find(stops)?;
        Some((model, texts, at))
    });
    found.expect("some model writes such texts")
}

#[test]
fn a_text_that_ends_does_not_hold_up_the_others() {
    let (model, texts, at) = texts_with_a_stop();
    let generator = Generator::new(&model).with_max_new(16);
    let generator = generator.with_stop(&[texts[0][at]]);
    let alone = generator.generate(&prompts()[..2]);
    assert_eq!((alone[0].tokens.len(), alone[1].tokens.len()), (at + 1, 16));
    // The first text ends with a token that is not proposed. All proposals for the other are right.
    let mut proposed = texts;
    proposed[0][at] = (proposed[0][at] + 1) % VOCABULARY as u32;
    let mut draft = Scripted::new(4, &proposed, NEVER);
    let written = generator.speculate(&prompts()[..2], &mut draft);
    assert_eq!(written.texts, alone);
    // One token from the prompt and three times five: the first text took part in the first step only.
    assert_eq!((written.report.steps, written.report.written), (3, at + 15));
    // A draft's caches drop the text as well.
    let other = Model::new(4);
    for small in [&model, &other] {
        let written = generator.speculate(&prompts()[..2], &mut ModelDraft::new(small, 3));
        assert_eq!(written.texts, alone);
    }
}

#[test]
fn proposals_of_different_lengths_are_verified_up_to_the_shortest() {
    let model = Model::new(3);
    let generator = Generator::new(&model).with_max_new(60);
    let [first, last] = [prompt(7, 5).repeat(3), prompt(4, 1).repeat(6)];
    let prompts = [first, prompt(23, 0), last];
    let alone = generator.generate(&prompts);
    let written = generator.speculate(&prompts, &mut PromptLookup::new(3, 6));
    assert_eq!(written.texts, alone);
    assert!(written.report.accepted > 0, "{:?}", written.report);
}

#[test]
fn a_text_ends_in_the_middle_of_what_is_accepted() {
    let model = Model::new(3);
    let generator = Generator::new(&model).with_max_new(21);
    let free = generator.generate(&prompts());
    let texts = tokens(&free);
    let mut draft = Scripted::new(6, &texts, NEVER);
    // Third token of the first text.
    let stopping = generator.clone().with_stop(&[texts[0][2]]);
    let alone = stopping.generate(&prompts());
    assert!(alone[0].tokens.len() <= 3 && alone[0].ended == Ended::Stop(texts[0][2]));
    assert_eq!(stopping.speculate(&prompts(), &mut draft).texts, alone);

    let mut events = Vec::new();
    let written = generator.try_speculate(&prompts(), &mut draft, |event| {
        events.push(event);
        match (event.sequence, event.index) {
            (1, 9) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let written = written.unwrap().texts;
    assert_eq!((&written[0], &written[2]), (&free[0], &free[2]));
    assert_eq!(written[1].tokens, texts[1][..10]);
    assert_eq!(written[1].ended, Ended::Callback);
    for (sequence, text) in written.iter().enumerate() {
        let of = events.iter().filter(|event| event.sequence == sequence);
        assert!(of.map(|event| event.token).eq(text.tokens.iter().copied()));
    }
}

//! Distributions of whole texts.

use crate::generate::chain::{Chain, assert_drawn_from, texts};
use flash_dma_models::generate::{Draft, Generated, Generator, ModelDraft, PromptLookup, Sampler};

/// Texts of three tokens after the token 0, counted over many seeds and sequences.
fn counts(generate: impl Fn(Sampler, &[[u32; 1]]) -> Vec<Generated>, batch: usize) -> Vec<usize> {
    let all = texts(4, 3);
    let mut counts = vec![0; all.len()];
    for seed in 0..9000 / batch as u64 {
        for text in generate(Sampler::random(seed), &vec![[0]; batch]) {
            let at = all.iter().position(|other| *other == text.tokens);
            counts[at.expect("a text has three tokens")] += 1;
        }
    }
    counts
}

fn target() -> Chain {
    Chain(vec![
        vec![0.1, 0.2, 0.3, 0.4],
        vec![0.25, 0.25, 0.25, 0.25],
        vec![0.6, 0.1, 0.1, 0.2],
        vec![0.2, 0.4, 0.2, 0.2],
    ])
}

/// Texts of three tokens.
fn generator(model: &Chain, sampler: Sampler) -> Generator<'_, Chain> {
    Generator::new(model).with_sampler(sampler).with_max_new(3)
}

fn probabilities() -> Vec<f64> {
    let (target, texts) = (target(), texts(4, 3));
    let texts = texts.iter();
    texts.map(|text| target.probability(0, text)).collect()
}

/// Another distribution, in which some tokens are impossible.
fn guess() -> Chain {
    Chain(vec![
        vec![0.4, 0.3, 0.3, 0.0],
        vec![0.7, 0.1, 0.1, 0.1],
        vec![0.0, 0.0, 1.0, 0.0],
        vec![0.1, 0.5, 0.2, 0.2],
    ])
}

fn assert_speculation_keeps_the_law<T: Draft>(draft: impl Fn() -> T, batch: usize) {
    let target = target();
    let accepted = std::cell::Cell::new([0, 0]);
    let speculate = |sampler, prompts: &[[u32; 1]]| {
        let written = generator(&target, sampler).speculate(prompts, &mut draft());
        let [yes, all] = accepted.get();
        accepted.set([yes + written.report.accepted, all + written.report.proposed]);
        written.texts
    };
    assert_drawn_from(&counts(speculate, batch), &probabilities());
    // Both happened often, so the distribution is not that of one of them.
    let [yes, all] = accepted.get();
    let often = yes * 10 > all && yes * 10 < all * 9;
    assert!(often, "{yes} of {all} were accepted");
}

#[test]
fn a_text_has_the_law_of_the_model() {
    let target = target();
    let generate = |sampler, prompts: &[[u32; 1]]| generator(&target, sampler).generate(prompts);
    assert_drawn_from(&counts(generate, 30), &probabilities());
}

#[test]
fn a_speculated_text_has_the_law_of_the_model() {
    let guess = guess();
    assert_speculation_keeps_the_law(|| ModelDraft::new(&guess, 2), 1);
}

#[test]
fn a_speculated_text_of_a_batch_has_the_law_of_the_model() {
    let guess = guess();
    assert_speculation_keeps_the_law(|| ModelDraft::new(&guess, 3), 3);
}

#[test]
fn a_text_after_a_lookup_has_the_law_of_the_model() {
    // An earlier token is proposed with its successor: certain, and often wrong.
    let target = target();
    let long = |sampler, prompts: &[[u32; 1]]| {
        // The distribution depends only on the last token, which is 0 again.
        let prompts: Vec<Vec<u32>> = prompts.iter().map(|_| vec![3, 0, 2, 1, 0]).collect();
        let generator = generator(&target, sampler);
        let mut draft = PromptLookup::new(2, 2);
        generator.speculate(&prompts, &mut draft).texts
    };
    assert_drawn_from(&counts(long, 1), &probabilities());
}

#[test]
fn filters_apply_to_what_is_verified() {
    let (target, guess) = (target(), guess());
    let generate = |sampler: Sampler, prompts: &[[u32; 1]]| {
        let generator = generator(&target, sampler.with_top_k(1));
        let mut draft = ModelDraft::new(&guess, 2);
        generator.speculate(prompts, &mut draft).texts
    };
    // The most likely each time: 3 after 0, 1 after 3, and all four equal ones stay.
    let law = |text: &Vec<u32>| if text.starts_with(&[3, 1]) { 0.25 } else { 0.0 };
    let after_one: Vec<f64> = texts(4, 3).iter().map(law).collect();
    assert_drawn_from(&counts(generate, 5), &after_one);
}

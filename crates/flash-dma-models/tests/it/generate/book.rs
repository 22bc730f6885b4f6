//! The program of the book's page "Generate".

use crate::generate::model::{Model, prompt};
use flash_dma_models::LanguageModel;
use flash_dma_models::generate::{Beams, Ended, GenerateError, Generator, ModelDraft, Sampler};
use std::ops::ControlFlow;

// ANCHOR: generate
/// Generates a text after each prompt, a token at a time.
fn write(
    model: &impl LanguageModel,
    prompts: &[Vec<u32>],
    end: u32,
    mut show: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>, GenerateError> {
    let sampler = Sampler::random(7)
        .with_temperature(0.8)
        .with_top_p(0.95)
        .with_repetition_penalty(1.1);
    let generator = Generator::new(model)
        .with_sampler(sampler)
        .with_max_new(32)
        .with_stop(&[end])
        .with_chunk(64);
    let texts = generator.try_stream(prompts, |event| {
        show(event.sequence, event.token);
        ControlFlow::Continue(())
    })?;
    let whole = texts.iter().filter(|text| text.ended == Ended::Stop(end));
    println!("{} of {} texts came to an end", whole.count(), texts.len());
    Ok(texts.into_iter().map(|text| text.tokens).collect())
}
// ANCHOR_END: generate

// ANCHOR: beams
/// The best text of four beams.
fn best(model: &impl LanguageModel, prompt: &[u32]) -> Result<Vec<u32>, GenerateError> {
    let generator = Generator::new(model).with_max_new(8);
    let mut beams = generator.try_beams(prompt, &Beams::new(4).with_length_penalty(1.0))?;
    Ok(beams.swap_remove(0).tokens)
}
// ANCHOR_END: beams

// ANCHOR: speculate
/// The greedy text of `model`, with a smaller model that guesses four tokens ahead.
fn sooner(
    model: &impl LanguageModel,
    small: &impl LanguageModel,
    prompt: &[u32],
) -> Result<Vec<u32>, GenerateError> {
    let generator = Generator::new(model).with_max_new(32);
    let mut draft = ModelDraft::new(small, 4);
    let mut written =
        generator.try_speculate(&[prompt], &mut draft, |_| ControlFlow::Continue(()))?;
    let report = written.report;
    println!(
        "{} steps, {:.2} accepted",
        report.steps,
        report.acceptance_rate()
    );
    Ok(written.texts.swap_remove(0).tokens)
}
// ANCHOR_END: speculate

#[test]
fn the_book_s_program_writes_what_it_shows() {
    let (model, small) = (Model::new(5), Model::new(6));
    let prompts = [prompt(80, 0), prompt(9, 1)];
    let mut shown = [const { Vec::new() }; 2];
    let texts = write(&model, &prompts, 3, |sequence, token| {
        shown[sequence].push(token)
    });
    assert_eq!(texts.unwrap(), shown);

    let text = best(&model, &prompts[0]).unwrap();
    let generator = Generator::new(&model).with_max_new(8);
    let beams = generator.beams(&prompts[0], &Beams::new(4));
    assert_eq!(text, beams[0].tokens);

    let text = sooner(&model, &small, &prompts[0]).unwrap();
    assert_eq!(text, model.greedy(&prompts[0], 32));
}

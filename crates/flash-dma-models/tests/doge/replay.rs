//! Steps that a graph replays write what launched steps write.

use crate::fixture::{CASES, devices};
use flash_dma_models::generate::{Generator, Sampler};

#[test]
fn replayed_steps_write_what_launched_steps_write() {
    for device in devices() {
        for case in &CASES {
            let tokens: Vec<u32> = case.expected().tokens.iter().map(|&t| t as u32).collect();
            let model = case.model(&device).for_generation();
            // Of three lengths, one of them before the window is full; the second text ends on the way.
            let prompts = [&tokens[..], &tokens[..5], &tokens[1..9]];
            for sampler in [Sampler::greedy(), Sampler::random(3).with_temperature(0.7)] {
                let generator = Generator::new(&model)
                    .with_sampler(sampler)
                    .with_max_new(24);
                let written = |generator: &Generator<'_, _>, stop_after: usize| {
                    let mut count = 0;
                    let texts = generator.try_stream(&prompts, |event| {
                        count += usize::from(event.sequence == 1);
                        match event.sequence == 1 && count == stop_after {
                            true => std::ops::ControlFlow::Break(()),
                            false => std::ops::ControlFlow::Continue(()),
                        }
                    });
                    let texts = texts.expect("the model reads its prompts").into_iter();
                    texts.map(|text| text.tokens).collect::<Vec<_>>()
                };
                let launched = generator.clone().with_replay(false);
                // In the warm-up, at the recorded step, and after replays; the last one never.
                for stop_after in [2, 5, 11, 100] {
                    assert_eq!(
                        written(&generator, stop_after),
                        written(&launched, stop_after),
                        "{}, {sampler:?}, the second text ends after {stop_after}",
                        case.name
                    );
                }
            }
        }
    }
}

//! Batches of prompts.

use crate::generate::model::{Model, Read, Watched, prompt};
use flash_dma_models::generate::{Ended, Event, Generated, Generator, Sampler};
use std::ops::ControlFlow;

/// Prompts of lengths around the windows and the chunks.
fn prompts() -> Vec<Vec<u32>> {
    let lengths = [23, 5, 60, 23, 1].into_iter().zip(0..);
    lengths.map(|(len, seed)| prompt(len, seed)).collect()
}

fn lengths(texts: &[Vec<u32>]) -> Vec<Generated> {
    let text = |tokens: &Vec<u32>| Generated {
        tokens: tokens.clone(),
        ended: Ended::Length,
    };
    texts.iter().map(text).collect()
}

#[test]
fn a_greedy_batch_equals_attention_over_the_whole_text() {
    let model = Model::new(1);
    let expected: Vec<Vec<u32>> = prompts().iter().map(|p| model.greedy(p, 12)).collect();
    let generator = Generator::new(&model).with_max_new(12);
    assert_eq!(generator.generate(&prompts()), lengths(&expected));
    // One at a time.
    for (prompt, text) in prompts().iter().zip(&expected) {
        assert_eq!(generator.generate(&[prompt])[0].tokens, *text);
    }
    // The texts differ, so none of the above is an accident.
    assert!((1..5).all(|i| expected[i] != expected[0]));
}

#[test]
fn chunks_change_nothing_and_take_constant_memory() {
    let model = Watched::new(Model::new(1));
    let generator = Generator::new(&model).with_max_new(8);
    let long = [prompt(150, 2)];
    let whole = generator.clone().with_chunk(1000).generate(&long);
    model.reads();
    for chunk in [1, 7, 16, 17, 64] {
        let chunked = generator.clone().with_chunk(chunk).generate(&long);
        assert_eq!(chunked, whole, "{chunk}");
        let reads = model.reads();
        let of_the_prompt = reads[..150_usize.div_ceil(chunk)].iter();
        let mut lengths = of_the_prompt.map(|read| read.len);
        assert_eq!(lengths.clone().sum::<usize>(), 150);
        assert!(lengths.all(|len| len <= chunk), "{reads:?}");
        // From the first token the windows take their final memory.
        assert!(reads[0].bytes > 0 && reads.iter().all(|read| read.bytes == reads[0].bytes));
    }
    // Several prompts, some of which end in the middle of a chunk.
    let whole = generator.generate(&prompts());
    assert_eq!(generator.with_chunk(10).generate(&prompts()), whole);
}

#[test]
fn a_stop_token_ends_one_text_and_no_other() {
    let model = Watched::new(Model::new(1));
    let generator = Generator::new(&model).with_max_new(12);
    let free = generator.generate(&prompts());
    model.reads();
    // A token that first occurs in the middle of the last text.
    let last = &free[4].tokens;
    let fresh = (2..10).find(|&at| !last[..at].contains(&last[at]));
    let at = fresh.expect("the text does not only repeat itself");
    let stop = last[at];
    let stopped = generator.with_stop(&[stop]).generate(&prompts());
    for (free, stopped) in free.iter().zip(&stopped) {
        let expected = match free.tokens.iter().position(|&token| token == stop) {
            Some(at) => (&free.tokens[..=at], Ended::Stop(stop)),
            None => (&free.tokens[..], Ended::Length),
        };
        assert_eq!((&stopped.tokens[..], stopped.ended), expected);
    }
    assert_eq!(stopped[4].tokens.len(), at + 1);
    let longer = |read| stopped.iter().filter(move |text| text.tokens.len() > read);
    let batches = model.reads().into_iter().skip(4).map(|read| read.sequences);
    // A text of n tokens is read n - 1 times: its last token is not read.
    let going = (1..12).map(|read| longer(read).count());
    assert!(batches.eq(going), "{stopped:?}");
}

#[test]
fn a_stop_sequence_ends_where_all_of_it_stands() {
    let model = Model::new(1);
    let generator = Generator::new(&model).with_max_new(12);
    let prompt = &prompts()[1..2];
    let free = &generator.generate(prompt)[0].tokens;
    // The first is not in the text before the end of the second; parts of both are.
    let stops = [vec![free[4], free[3]], free[2..5].to_vec()];
    let ends = |stop: &Vec<u32>| free.windows(stop.len()).position(|part| part == stop);
    assert_eq!(ends(&stops[1]), Some(2), "{free:?}");
    assert!(ends(&stops[0]).is_none_or(|at| at > 3), "{free:?}");
    let stopped = generator.with_stop_sequences(&stops).generate(prompt);
    assert_eq!(stopped[0].ended, Ended::StopSequence(1));
    assert_eq!(stopped[0].tokens, free[..5]);
}

#[test]
fn the_callback_sees_each_token_and_may_end_its_text() {
    let model = Model::new(1);
    let generator = Generator::new(&model).with_max_new(6);
    let free = generator.generate(&prompts());
    let mut events: Vec<Event> = Vec::new();
    let texts = generator.try_stream(&prompts(), |event| {
        events.push(event);
        match (event.sequence, event.index) {
            // The second ends by its length anyway.
            (2, 3) | (0, 5) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let texts = texts.unwrap();
    assert_eq!(texts[2].ended, Ended::Callback);
    assert_eq!(texts[2].tokens, free[2].tokens[..4]);
    for other in [0, 1, 3, 4] {
        assert_eq!(texts[other], free[other]);
    }
    // In order of the tokens, and for each of the prompts.
    let order = |event: &Event| (event.index, event.sequence);
    assert!(events.is_sorted_by_key(order), "{events:?}");
    for (sequence, text) in texts.iter().enumerate() {
        let of = || events.iter().filter(|event| event.sequence == sequence);
        let tokens: Vec<u32> = of().map(|event| event.token).collect();
        assert_eq!(tokens, text.tokens);
        let ended = (sequence != 2).then_some(Ended::Length);
        assert_eq!(of().next_back().unwrap().ended, ended);
        assert!(of().rev().skip(1).all(|event| event.ended.is_none()));
    }
}

#[test]
fn a_drawn_text_depends_on_seed_and_index_and_not_on_the_batch() {
    let model = Model::new(1);
    let draw = |seed, prompts: &[Vec<u32>]| {
        let sampler = Sampler::random(seed).with_temperature(2.0).with_top_k(20);
        let generator = Generator::new(&model).with_sampler(sampler);
        generator.with_max_new(10).generate(prompts)
    };
    let [a, b, c] = [prompt(9, 0), prompt(30, 1), prompt(4, 2)];
    let first = draw(5, &[a.clone(), b.clone(), c.clone()]);
    assert_eq!(draw(5, &[a.clone(), b.clone(), c.clone()]), first);
    // The second with other prompts around it, and fewer.
    assert_eq!(draw(5, &[c.clone(), b.clone()])[1], first[1]);
    assert_eq!(draw(5, std::slice::from_ref(&a))[0], first[0]);
    assert_ne!(draw(6, std::slice::from_ref(&a))[0], first[0]);
    // The same prompt twice gives two draws.
    let twice = draw(5, &[b.clone(), b]);
    assert_eq!(twice[1], first[1]);
    assert_ne!(twice[0], twice[1]);
}

#[test]
fn the_repetition_penalty_counts_prompt_and_text() {
    let model = Model::new(1);
    let prompt = prompt(20, 0);
    let strict = Sampler::greedy().with_repetition_penalty(1.5);
    let generator = Generator::new(&model).with_max_new(12);
    let free = generator.generate(&[&prompt]);
    let written = generator.with_sampler(strict).generate(&[&prompt]);
    assert_ne!(written, free);
    let mut text = prompt;
    for &token in &written[0].tokens {
        let punished = |(token, logit): (usize, f32)| match text.contains(&(token as u32)) {
            true if logit < 0.0 => logit * 1.5,
            true => logit / 1.5,
            false => logit,
        };
        let logits = model.logits(&text).into_iter().enumerate();
        let logits: Vec<f32> = logits.map(punished).collect();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(logits[token as usize], best, "after {text:?}");
        text.push(token);
    }
}

#[test]
fn nothing_to_write_reads_nothing() {
    let model = Watched::new(Model::new(1));
    let none: [Vec<u32>; 0] = [];
    assert_eq!(Generator::new(&model).generate(&none), []);
    let texts = Generator::new(&model).with_max_new(0).generate(&prompts());
    assert_eq!(texts, lengths(&vec![Vec::new(); 5]));
    assert_eq!(model.reads(), Vec::<Read>::new());
}

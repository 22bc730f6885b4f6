//! Logits and generation equal those of `transformers`.

use crate::doge::fixture::{
    EXPERTS, TOLERANCE, assert_close, device, devices, difference, everywhere, rows, sequence,
};
use burn::tensor::{Device, FloatDType};
use flash_dma_models::LanguageModel;
use flash_dma_models::doge::Doge;
use flash_dma_models::nn::Routing;

/// The fixture's rows of a pass.
fn pass(model: &Doge, tokens: &[i32], chosen: &[usize], device: &Device) -> Vec<Vec<f32>> {
    let all = rows(model.forward(sequence(tokens, device)));
    chosen.iter().map(|&row| all[row].clone()).collect()
}

#[test]
fn logits_are_those_of_transformers() {
    for (case, device) in everywhere() {
        let expected = case.expected();
        let model = case.model(&device);
        let ours = pass(&model, &expected.tokens, &expected.rows, &device);
        assert_close(case.name, &ours, &expected.logits_by_step, TOLERANCE);
        let model = model.with_routing(Routing::AcrossTokens);
        let ours = pass(&model, &expected.tokens, &expected.rows, &device);
        assert_close(case.name, &ours, &expected.logits_at_once, TOLERANCE);
    }
}

/// Greedy generation through caches, reading the prompt in pieces: all tokens, and the logits of each.
fn generate(model: &Doge, prompt: &[i32], new: usize, piece: usize) -> (Vec<i32>, Vec<Vec<f32>>) {
    let device = model.device();
    let mut caches = model.try_init_caches(1).expect("the model has caches");
    let (mut tokens, mut logits) = (prompt.to_vec(), Vec::new());
    while logits.len() < prompt.len() + new {
        if logits.len() == tokens.len() {
            let last: &Vec<f32> = &logits[logits.len() - 1];
            let best = (0..last.len()).max_by(|&i, &j| last[i].total_cmp(&last[j]));
            tokens.push(best.expect("a vocabulary") as i32);
        }
        let piece = &tokens[logits.len()..tokens.len().min(logits.len() + piece)];
        let read = model.try_read(sequence(piece, &device), piece.len(), &mut caches);
        logits.extend(rows(read.expect("the caches are the model's")));
    }
    (tokens, logits)
}

#[test]
fn generation_is_that_of_transformers_token_for_token() {
    for (case, device) in everywhere() {
        let expected = case.expected();
        let (prompt, new) = expected.tokens.split_at(expected.prompt);
        let model = case.model(&device).for_generation();
        // Shorter than the window, longer, and one at a time.
        for piece in [1, 7, 25, prompt.len()] {
            let (tokens, logits) = generate(&model, prompt, new.len(), piece);
            assert_eq!(tokens, expected.tokens, "{}, pieces of {piece}", case.name);
            let rows = expected.rows.iter();
            let ours: Vec<_> = rows.map(|&row| logits[row].clone()).collect();
            assert_close(case.name, &ours, &expected.logits_by_step, TOLERANCE);
        }
    }
}

#[test]
fn the_last_rows_are_those_that_are_asked_for() {
    let device = device();
    let expected = EXPERTS.expected();
    let model = EXPERTS.model(&device).for_generation();
    let read = |count| {
        let mut caches = model.try_init_caches(1).expect("the model has caches");
        let tokens = sequence(&expected.tokens, &device);
        rows(model.try_read(tokens, count, &mut caches).expect("it fits"))
    };
    let all = read(expected.tokens.len());
    // The sums of fewer rows are in another order.
    assert_close("rows", &read(3), &all[all.len() - 3..], TOLERANCE);
    assert!(read(0).is_empty());
}

#[test]
fn parameters_of_16_bits_count_for_what_they_are_in_f32() {
    for (case, device) in everywhere() {
        let tokens = case.expected().tokens;
        let model = case.model(&device).with_dtype(FloatDType::BF16);
        let narrow = model.for_generation().with_dtype(FloatDType::F32);
        let wide = narrow.for_generation();
        let logits = |model: &Doge| rows(model.forward(sequence(&tokens, &device)));
        assert_close(case.name, &logits(&narrow), &logits(&wide), TOLERANCE);
    }
}

/// Rounding in 16 bits moves keys across the border of the window, so the window is as long as the text here. A
/// logit's sums are each rounded to 8 bits; 4 of the greatest logit's 8 bits remain.
#[test]
fn bf16_is_near_f32_where_the_window_decides_nothing() {
    for (case, device) in everywhere() {
        let expected = case.expected();
        let directory = case.directory();
        let logits = |dtype| {
            let model = Doge::from_safetensors_as(directory.path(""), dtype, &device);
            let mut model = model.expect("the fixture fits");
            for block in &mut model.blocks {
                block.attention.set_keep_window(expected.tokens.len());
            }
            rows(model.forward(sequence(&expected.tokens, &device)))
        };
        let exact = logits(FloatDType::F32);
        let sizes = exact.iter().flatten().map(|x| x.abs());
        let greatest = sizes.fold(0.0, f32::max);
        let near = logits(FloatDType::BF16);
        assert_close(case.name, &near, &exact, greatest / 16.0);
        assert!(difference(&near, &exact) > TOLERANCE, "it is f32");
    }
}

/// Change of the earlier logits with the last token.
fn leak(routing: Routing, device: &Device) -> f32 {
    let model = EXPERTS.model(device).with_routing(routing);
    let mut tokens = EXPERTS.expected().tokens;
    let logits = |tokens: &[i32]| {
        let mut all = rows(model.forward(sequence(tokens, device)));
        all.pop();
        all
    };
    let before = logits(&tokens);
    let last = tokens.len() - 1;
    tokens[last] = (tokens[last] + 1) % 60;
    difference(&logits(&tokens), &before)
}

#[test]
fn routing_per_token_sees_no_later_token_and_routing_across_tokens_does() {
    for device in devices() {
        assert!(leak(Routing::PerToken, &device) < 1e-5);
        assert!(leak(Routing::AcrossTokens, &device) > 1e-3);
    }
}

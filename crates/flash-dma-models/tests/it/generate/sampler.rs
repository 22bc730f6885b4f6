//! Distributions of the next token, compared with hand-written ones.

use crate::generate::chain::assert_drawn_from;
use flash_dma_models::generate::{Distribution, Draw, Purpose, SampleError, Sampler};

/// Logits with these weights.
fn logits(weights: &[f64]) -> Vec<f32> {
    weights.iter().map(|weight| weight.ln() as f32).collect()
}

/// Probabilities of as many tokens as there are weights.
fn law(sampler: Sampler, weights: &[f64]) -> Vec<f64> {
    let law = sampler.try_distribution(&logits(weights), &[]).unwrap();
    let tokens = 0..weights.len() as u32;
    tokens.map(|token| law.probability(token)).collect()
}

/// Compares a sampler's distribution for weights with expected weights.
fn assert_law(sampler: Sampler, weights: &[f64], expected: &[f64]) {
    let (actual, total) = (law(sampler, weights), expected.iter().sum::<f64>());
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        // A token that is cut off has probability 0, not a small one.
        let close = (a - e / total).abs() < 1e-6 && (*a == 0.0) == (*e == 0.0);
        assert!(close, "{actual:?} is not {expected:?}");
    }
}

#[test]
fn without_filters_the_law_is_the_softmax() {
    let weights = [1.0, 2.0, 5.0, 2.0];
    assert_law(Sampler::random(0), &weights, &weights);
    let cold = Sampler::random(0).with_temperature(0.5);
    assert_law(cold, &weights, &weights.map(|weight| weight * weight));
}

#[test]
fn greedy_takes_the_greatest_and_of_equal_ones_the_first() {
    let greedy = law(Sampler::greedy(), &[1.0, 5.0, 2.0, 5.0]);
    assert_eq!(greedy, [0.0, 1.0, 0.0, 0.0]);
    assert!(Sampler::greedy().is_plain_greedy());
    // A temperature near 0 divides differences by almost nothing, and must not overflow.
    let cold = Sampler::random(0).with_temperature(1e-300);
    assert_eq!(law(cold, &[1.0, 5.0, 2.0]), [0.0, 1.0, 0.0]);
    assert_law(cold, &[5.0, 5.0, 2.0], &[1.0, 1.0, 0.0]);
}

#[test]
fn top_k_keeps_what_equals_the_last_of_them() {
    let sampler = Sampler::random(0).with_top_k(2);
    assert_law(sampler, &[1.0, 2.0, 6.0, 1.0], &[0.0, 2.0, 6.0, 0.0]);
    assert_law(sampler, &[1.0, 2.0, 6.0, 2.0], &[0.0, 2.0, 6.0, 2.0]);
    assert_law(sampler.with_top_k(9), &[1.0, 1.0, 2.0], &[1.0, 1.0, 2.0]);
}

#[test]
fn top_p_keeps_the_fewest_that_reach_it() {
    let weights = [0.1, 0.4, 0.2, 0.3];
    for (p, kept) in [
        (0.0, [0.0, 0.4, 0.0, 0.0]),
        (0.39, [0.0, 0.4, 0.0, 0.0]),
        (0.41, [0.0, 0.4, 0.0, 0.3]),
        (0.75, [0.0, 0.4, 0.2, 0.3]),
        (1.0, weights),
    ] {
        assert_law(Sampler::random(0).with_top_p(p), &weights, &kept);
    }
    // Among equally likely tokens the first ones stay.
    let sampler = Sampler::random(0).with_top_p(0.6);
    assert_law(sampler, &[1.0; 4], &[1.0, 1.0, 1.0, 0.0]);
}

#[test]
fn min_p_compares_with_the_greatest() {
    let weights = [1.0, 4.0, 10.0, 5.0];
    for (p, kept) in [
        (0.0, weights),
        (0.3, [0.0, 4.0, 10.0, 5.0]),
        (0.45, [0.0, 0.0, 10.0, 5.0]),
        (1.0, [0.0, 0.0, 10.0, 0.0]),
    ] {
        assert_law(Sampler::random(0).with_min_p(p), &weights, &kept);
    }
}

#[test]
fn filters_apply_one_after_the_other() {
    // Top-k leaves 6, 3, 2 of 12; top-p 0.8 needs 6 and 3 of these 11.
    let weights = [0.5, 6.0, 3.0, 2.0, 0.5];
    let sampler = Sampler::random(0).with_top_k(3).with_top_p(0.8);
    assert_law(sampler, &weights, &[0.0, 6.0, 3.0, 0.0, 0.0]);
    // The temperature comes before: 36, 9, 4, so that top-p needs 36 and 9 of 49.5; min-p then drops 9.
    let sampler = Sampler::random(0).with_temperature(0.5).with_top_p(0.8);
    let sampler = sampler.with_min_p(0.3);
    assert_law(sampler, &weights, &[0.0, 36.0, 0.0, 0.0, 0.0]);
}

#[test]
fn the_repetition_penalty_divides_above_zero_and_multiplies_below() {
    let sampler = Sampler::greedy().with_repetition_penalty(2.0);
    assert!(!sampler.is_plain_greedy());
    let best = |logits: &[f32], history: &[u32]| {
        let law = sampler.try_distribution(logits, history).unwrap();
        law.tokens().collect::<Vec<_>>()
    };
    assert_eq!(best(&[3.0, 2.0], &[]), [0]);
    assert_eq!(best(&[3.0, 2.0], &[0]), [1]);
    // Once, however often it occurred: 5 becomes 2.5, not 1.25.
    assert_eq!(best(&[5.0, 2.0], &[0, 0, 0]), [0]);
    // -1 becomes -2.
    assert_eq!(best(&[-1.0, -1.5], &[0]), [1]);
    assert_eq!(best(&[-1.0, -2.5], &[0]), [0]);
    // With 2 instead of 4, the odds are e^2 to e^3.
    let drawn = Sampler::random(0).with_repetition_penalty(2.0);
    let law = drawn.try_distribution(&[4.0, 3.0], &[0]).unwrap();
    assert!((law.probability(1) - 1.0 / (1.0 + (-1.0_f64).exp())).abs() < 1e-12);
}

#[test]
fn draws_follow_the_law_and_depend_on_seed_sequence_and_token() {
    let sampler = Sampler::random(11);
    let weights = [1.0, 2.0, 5.0, 2.0, 6.0, 4.0];
    let law = sampler.try_distribution(&logits(&weights), &[]).unwrap();
    let probabilities: Vec<f64> = weights.iter().map(|weight| weight / 20.0).collect();
    let draw = |sequence, token| Draw {
        sequence,
        token,
        purpose: Purpose::Token,
    };
    // Along a text, and across texts.
    for of in [|n| (3, n), |n| (n, 3)] {
        let mut counts = [0; 6];
        for n in 0..20_000 {
            let (sequence, token) = of(n);
            counts[law.at(sampler.unit(draw(sequence, token))) as usize] += 1;
        }
        assert_drawn_from(&counts, &probabilities);
    }
    // Neighbours are independent: all 36 pairs.
    let mut pairs = [0; 36];
    for n in 0..20_000 {
        let at = |token| law.at(sampler.unit(draw(n, token))) as usize;
        pairs[6 * at(0) + at(1)] += 1;
    }
    let products = |p| probabilities.iter().map(move |q| p * q);
    let products: Vec<f64> = probabilities.iter().flat_map(products).collect();
    assert_drawn_from(&pairs, &products);

    let same = sampler.unit(draw(5, 8));
    assert_eq!(Sampler::random(11).unit(draw(5, 8)), same);
    assert_ne!(Sampler::random(12).unit(draw(5, 8)), same);
    for purpose in [Purpose::Proposal, Purpose::Acceptance, Purpose::Replacement] {
        let mut other = draw(5, 8);
        other.purpose = purpose;
        assert_ne!(sampler.unit(other), same);
    }
}

#[test]
fn a_unit_is_taken_to_a_token_by_the_cumulative_probability() {
    let law = Sampler::random(0).try_distribution(&logits(&[1.0, 0.0, 3.0]), &[]);
    let law = law.unwrap();
    let tokens = [0.0, 0.2499, 0.2501, 0.9999].map(|unit| law.at(unit));
    assert_eq!(tokens, [0, 0, 2, 2]);
    assert_eq!(law.tokens().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(Distribution::certain(4).at(0.7), 4);
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let text = |sampler: Sampler| {
        let error = sampler.try_check().unwrap_err();
        // The distribution is refused for the same reason.
        let distribution = sampler.try_distribution(&[0.0], &[]).unwrap_err();
        assert_eq!(distribution.to_string(), error.to_string());
        error.to_string()
    };
    let random = Sampler::random(0);
    for temperature in [-0.1, f64::NAN, f64::INFINITY] {
        let expected = format!("temperature is {temperature}, but must be finite and at least 0");
        assert_eq!(text(random.with_temperature(temperature)), expected);
    }
    let free = random.with_repetition_penalty(0.0);
    for (sampler, number, range) in [
        (random.with_top_k(0), "top_k is 0", "at least 1"),
        (random.with_top_p(1.5), "top_p is 1.5", "from 0 to 1"),
        (random.with_top_p(f64::NAN), "top_p is NaN", "from 0 to 1"),
        (random.with_min_p(-1.0), "min_p is -1", "from 0 to 1"),
        (free, "repetition_penalty is 0", "finite and above 0"),
    ] {
        assert_eq!(text(sampler), format!("{number}, but must be {range}"));
    }
}

#[test]
fn logits_without_a_law_are_refused() {
    for sampler in [Sampler::greedy(), Sampler::random(0)] {
        let error = |logits: &[f32]| sampler.try_distribution(logits, &[]).unwrap_err();
        assert_eq!(error(&[0.0, f32::NAN]), SampleError::NotANumber);
        let infinite = SampleError::Infinite { token: 1 };
        assert_eq!(error(&[0.0, f32::INFINITY]), infinite);
        assert_eq!(error(&[f32::NEG_INFINITY; 3]), SampleError::Impossible);
        assert_eq!(error(&[]), SampleError::Impossible);
    }
}

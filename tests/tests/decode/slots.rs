//! The cache of constant size.

use super::rules;
use super::sequences::{Decoder, Sequences, Shape, shape};
use burn::tensor::Tensor;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::{Attention, Documents, Selector};
use flash_dma_tests::prelude::*;

every_burn!(
    one_token_at_a_time,
    pieces_of_any_size,
    beams_and_resets,
    options_in_f32: options(F32),
    options_in_f16: options(F16),
    options_in_bf16: options(Bf16),
    a_prompt_in_chunks_or_at_once,
    recent_keys_and_sinks,
    recent_keys_and_sinks_over_thousands_of_tokens,
    scores_that_only_rank,
    documents_restart_the_cache,
);

/// A cache that keeps the best keys of the options' window.
fn of_best<B: Backend>(
    burn: &Burn<B>,
    shape: Shape,
    batch: usize,
    kind: Scores,
    options: AttentionOptions,
) -> Decoder {
    Sequences::new(shape, batch, Some(kind), options, batch as u64).in_slots(burn)
}

fn under<B: Backend>(burn: &Burn<B>, rule: SelectionRule, batch: usize, kind: Scores) -> Decoder {
    let options = window(rule.window);
    let sequences = Sequences::new(shape(F32), batch, Some(kind), options, batch as u64);
    sequences.under(rule).in_slots(burn)
}

/// Appends as many tokens without attention.
fn append(decoder: &mut Decoder, count: usize) {
    let tokens = decoder.grow(count);
    let AttentionCache::DynamicMask(cache) = &mut decoder.cache else {
        unreachable!("slots")
    };
    let scores = tokens.scores.expect("slots have scores");
    cache.append(tokens.k, tokens.v, scores);
}

fn window(keys: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(keys)
}

/// Thousands of prefixes: every kind of scores, ties and NaN and −∞ among them.
fn one_token_at_a_time<B: Backend>(burn: &Burn<B>) {
    for kind in Burn::<B>::cases([Scores::Ties], Scores::ALL, []) {
        for (keys, steps) in Burn::<B>::cases([(6, 20)], [(1, 40), (23, 250)], [(64, 150)]) {
            let mut decoder = of_best(burn, shape(F32), 2, kind, window(keys));
            for _ in 0..steps {
                decoder.step(1);
            }
        }
    }
}

fn pieces_of_any_size<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(5);
    for kind in Burn::<B>::cases([Scores::Nan], Scores::ALL, []) {
        for (keys, pieces) in Burn::<B>::cases([(9, 6)], [(40, 30)], [(100, 40)]) {
            let mut decoder = of_best(burn, shape(F32), 1, kind, window(keys));
            for _ in 0..pieces {
                // Mostly decode steps, and some chunks.
                let most = [4, 16, 16, 60][rng.below(4)];
                decoder.step(1 + rng.below(most));
            }
        }
    }
}

/// Sequences of different lengths, reordered, repeated, dropped and restarted.
fn beams_and_resets<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(6);
    for kind in Burn::<B>::cases([Scores::Padded], [Scores::Ties], [Scores::Nan]) {
        let rounds = Burn::<B>::cases([4], [36], []).into_iter().sum();
        let mut decoder = of_best(burn, shape(F32), 3, kind, window(11));
        decoder.beams_and_resets(rounds, &mut rng);
    }
}

fn options<B: Backend>(burn: &Burn<B>, element: ElementType) {
    if burn.lacks(element) {
        return;
    }
    for (q_heads, kv_heads, dim) in Burn::<B>::cases(
        [(2, 1, 32)],
        [(6, 2, 8), (3, 3, 40)],
        [(32, 8, 128), (8, 1, 64), (4, 2, 256)],
    ) {
        let shape = Shape {
            q_heads,
            kv_heads,
            dim,
            element,
        };
        let options = window(12).with_softcap(3.0).with_scale(0.4);
        for options in Burn::<B>::cases([options], [window(30)], []) {
            let mut decoder = of_best(burn, shape, 2, Scores::Recency, options);
            for count in Burn::<B>::cases([20, 2], [1, 16, 5, 1, 1, 40, 7, 1], [300, 1, 1, 4]) {
                decoder.step(count);
            }
        }
    }
}

fn a_prompt_in_chunks_or_at_once<B: Backend>(burn: &Burn<B>) {
    for (len, keys) in Burn::<B>::cases([(50, 8)], [(300, 33)], [(3000, 512)]) {
        let mut whole = of_best(burn, shape(F32), 1, Scores::Ties, window(keys));
        whole.step(len);
        for chunk in Burn::<B>::cases([25], [17, 90, 150], [1000]) {
            let mut parts = of_best(burn, shape(F32), 1, Scores::Ties, window(keys));
            for from in (0..len).step_by(chunk) {
                parts.step(chunk.min(len - from));
            }
        }
        // Appended without attention.
        let mut parts = of_best(burn, shape(F32), 1, Scores::Ties, window(keys));
        for from in (0..len).step_by(20) {
            append(&mut parts, 20.min(len - from));
        }
        parts.check_held();
        parts.step(1);
    }
}

/// Steps, chunks and prompts, with hidden keys, recent keys and sinks; of a size that matrix engines take.
fn scores_that_only_rank<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(9);
    let kinds = [Scores::Ties, Scores::Padded, Scores::AllPadded, Scores::Nan];
    for element in Burn::<B>::cases([F32], [Bf16], []) {
        if !burn.supports(element) {
            continue;
        }
        let shape = Shape {
            dim: 32,
            ..shape(element)
        };
        for kind in Burn::<B>::cases([Scores::Large], kinds, []) {
            for rule in [rules(9)[2], rules(9)[3], SelectionRule::top(9)] {
                let sequences = Sequences::new(shape, 2, Some(kind), window(9), 2).under(rule);
                let mut decoder = sequences.with_role(ScoreRole::Rank).in_slots(burn);
                for most in [20, 1, 1, 7, 1, 16, 30, 1] {
                    decoder.step(1 + rng.below(most));
                }
            }
        }
    }
}

/// Single tokens, several at once and chunks of odd lengths, with ties, NaN and −∞.
fn recent_keys_and_sinks<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(7);
    let all = [
        Scores::Ties,
        Scores::AllEqual,
        Scores::Padded,
        Scores::AllPadded,
        Scores::Normal,
    ];
    for kind in Burn::<B>::cases([Scores::Nan], all, []) {
        for (keys, pieces) in Burn::<B>::cases([(5, 4)], [(1, 20), (24, 25)], [(100, 40)]) {
            for rule in rules(keys) {
                if rule.check().is_err() {
                    continue;
                }
                let mut decoder = under(burn, rule, 2, kind);
                for piece in 0..pieces {
                    // A prompt, steps, and chunks between them.
                    let most = [37, 1, 5, 1, 16, 60, 1][piece % 7];
                    decoder.step(1 + rng.below(most));
                }
            }
        }
    }
}

/// Thousands of tokens; some steps are compared with a pass over all of them.
fn recent_keys_and_sinks_over_thousands_of_tokens<B: Backend>(burn: &Burn<B>) {
    let len = Burn::<B>::cases([200], [2200], [3000]).pop();
    let len = len.expect("every engine has a length");
    let mut rng = Rng::new(8);
    for kind in Burn::<B>::cases([Scores::Nan], [Scores::Normal, Scores::Ties], []) {
        for rule in rules(13) {
            let mut decoder = under(burn, rule, 1, kind);
            let mut given = 0;
            while given < len {
                let most = [1, 1, 2, 16, 90][rng.below(5)];
                let count = (1 + rng.below(most)).min(len - given);
                given += count;
                if rng.below(40) == 0 || given == len {
                    decoder.step(count);
                } else {
                    append(&mut decoder, count);
                }
            }
        }
    }
}

/// Documents in one sequence equal a cache that is reset where each of them begins.
fn documents_restart_the_cache<B: Backend>(burn: &Burn<B>) {
    let lengths = Burn::<B>::cases(
        [vec![23, 1, 36]],
        [vec![50, 300, 2, 48]],
        [vec![700, 33, 3000]],
    );
    for lengths in lengths {
        for rule in rules(11) {
            let len: usize = lengths.iter().sum();
            let mut sequences = Sequences::new(shape(F32), 1, Some(Scores::Nan), window(11), 5);
            let tokens = sequences.grow(len, burn.device());
            let scores = tokens.scores.clone().expect("slots have scores");
            let selector = Selector::top(rule.window).recent(rule.recent);
            let documents = Documents::from_lengths([lengths.clone()]);
            let selector = selector.sinks(rule.sinks).documents(documents);
            let intervals = selector.select(scores.clone());
            let (q, k, v) = (tokens.q, tokens.k, tokens.v);
            let attention = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores.clone());
            let attention = attention.intervals(&intervals).options(window(11));
            let whole = attention.forward();

            let mut cache = sequences.under(rule).in_slots(burn).cache;
            let mut at = 0;
            for &document in &lengths {
                cache.reset(0);
                let end = at + document;
                for count in [20, 1, 3].into_iter().cycle() {
                    let count = count.min(end - at);
                    let part = |x: &Tensor<4>| x.clone().narrow(2, at, count);
                    let z = scores.clone().narrow(2, at, count);
                    let out = cache.step(part(&q), part(&k), part(&v), Some(z));
                    let [actual, expected] = [out, part(&whole)].map(|x| x.into_data_as::<f32>());
                    for (a, e) in actual.iter::<f32>().zip(expected.iter::<f32>()) {
                        let same = (a - e).abs() < 2e-5 || (a.is_nan() && e.is_nan());
                        assert!(same, "{a} is not {e}: tokens from {at}, {rule:?}");
                    }
                    at += count;
                    if at == end {
                        break;
                    }
                }
            }
        }
    }
}

//! Tokens dealt to heads in turn: the kept keys, decoding, learning, and refusals.

use crate::case::{refused, values, within};
use crate::layer::{self, Groups, gradients_with_scores, like, tokens_for};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Scores};

const LEN: usize = 33;
const WINDOW: usize = 5;

fn config(turns: Option<usize>) -> DynamicMaskAttentionConfig {
    layer::config().selection(|s| {
        s.with_window(Some(WINDOW))
            .with_recency(false)
            .with_turns(turns)
    })
}

/// Positions that every query of a head attends to, `[batch][kv_head][query]`.
fn kept(layer: &DynamicMaskAttention, x: Tensor<3>) -> Vec<Vec<Vec<Vec<usize>>>> {
    let mask = layer.selection(x).as_mask(LEN);
    let [batch, heads, _, _] = mask.dims();
    let mask: Vec<bool> = mask.into_data().iter().collect();
    let row = |text: usize, head: usize, query: usize| {
        let row = &mask[((text * heads + head) * LEN + query) * LEN..][..LEN];
        (0..LEN).filter(|&key| row[key]).collect()
    };
    let of_head = |text, head| (0..LEN).map(|query| row(text, head, query)).collect();
    (0..batch)
        .map(|text| (0..heads).map(|head| of_head(text, head)).collect())
        .collect()
}

#[test]
fn a_score_is_lower_in_the_heads_that_are_not_dealt_its_token() {
    let plain = config(None).init(&Device::flex());
    let dealt = like(&plain, &config(Some(3)));
    let x = tokens_for(&plain, 2, LEN);
    let scores = values(plain.scores(x.clone()));
    let expected = scores.into_iter().enumerate().map(|(place, score)| {
        let (head, position) = (place / LEN % 2, place % LEN);
        match position / 3 % 2 == head {
            true => score,
            false => score - 1000.0,
        }
    });
    let expected: Vec<f64> = expected.collect();
    within(&values(dealt.scores(x)), &expected, 1e-4, "scores");
}

/// By definition: a head's window is the best of its own tokens, filled up with others while it has too few.
#[test]
fn heads_keep_their_own_tokens() {
    let layer = config(Some(2)).init(&Device::flex());
    for heads in kept(&layer, tokens_for(&layer, 2, LEN)) {
        for (head, queries) in heads.iter().enumerate() {
            for (query, keys) in queries.iter().enumerate() {
                let own = |key: usize| key / 2 % 2 == head;
                let visible = (0..=query).filter(|&key| own(key)).count();
                let of_own = keys.iter().filter(|&&key| own(key)).count();
                assert_eq!(keys.len(), WINDOW.min(query + 1), "{head} {query}");
                assert_eq!(of_own, visible.min(WINDOW), "{head} {query}: {keys:?}");
            }
        }
    }
}

#[test]
fn a_cache_deals_by_the_position_in_the_sequence() {
    let layer = config(Some(3)).init(&Device::flex());
    let x = tokens_for(&layer, 2, LEN);
    let whole = values(layer.forward(x.clone()));
    let mut cache = layer.init_cache(2);
    let mut parts = vec![layer.forward_cached(x.clone().narrow(1, 0, 7), &mut cache)];
    for at in 7..LEN {
        parts.push(layer.forward_cached(x.clone().narrow(1, at, 1), &mut cache));
    }
    let decoded = values(Tensor::cat(parts, 1));
    within(&decoded, &whole, 1e-5, "decoded");
}

#[test]
fn scores_learn_beside_it() {
    let layer = config(Some(2)).init(&Device::flex().autodiff());
    gradients_with_scores(&layer, LEN);
}

#[test]
fn what_it_does_not_fit_is_refused() {
    let device = Device::flex();
    for config in [
        config(Some(0)),
        config(Some(1 << 31)),
        config(Some(2)).with_scores(Scores::Added),
        config(Some(2)).with_scores(Scores::Dma),
    ] {
        refused(config.try_init(&device), "Turns");
    }
    for config in [
        config(Some(2)).logits(|l| l.with_causal(false)),
        config(Some(2)).selection(|s| s.with_window(None)),
    ] {
        assert!(config.try_init(&device).is_ok());
    }
}

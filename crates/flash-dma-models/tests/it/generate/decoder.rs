//! The decoder-only model: the keys its layers keep, and agreement of its text with its logits over the whole text.

use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, Scorer, Scores, Selection,
};
use flash_dma_models::generate::Generator;
use flash_dma_models::nn::{DecoderConfig, last_keys};
use flash_dma_models::{Curriculum, LanguageModel};

fn attention() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 2)
        .with_n_kv_heads(Some(1))
        .with_selection(Selection::keep(16))
        .with_rope(Some(Rope::new(64)))
}

fn layers(config: &DecoderConfig) -> Vec<DynamicMaskAttention> {
    let blocks = config.init(&Device::flex()).blocks;
    blocks.into_iter().map(|block| block.attention).collect()
}

fn text(len: i64) -> Tensor<2, Int> {
    Tensor::<1, Int>::arange(0..len, &Device::flex()).reshape([1, len as usize])
}

#[test]
fn layers_that_keep_the_last_keys_differ_in_what_is_recent_and_not_in_their_parameters() {
    let dma = attention().with_scores(Scores::Dma);
    for (attention, recent) in [(attention(), 4.0), (last_keys(&dma, Some(16)), 16.0)] {
        let config = DecoderConfig::new(attention, 2).with_local_window(None);
        for layer in layers(&config) {
            assert!(matches!(layer.scorer(), Scorer::Linear(_)));
            assert_eq!(layer.score_role(), ScoreRole::Rank);
        }
        let model = config.init(&Device::flex());
        for selection in model.try_selections(text(64)).expect("it fits") {
            let (intervals, _) = selection.expect("a window");
            // At the first positions all pairs are recent, so the share is a little more.
            let share = intervals.stats().recent;
            assert!((0.0..0.1).contains(&(share - recent / 16.0)), "{share}");
        }
    }
}

#[test]
fn odd_layers_may_be_local_and_the_others_without_positions() {
    let dealt = attention().with_selection(Selection::keep(16).with_turns(Some(3)));
    let config = DecoderConfig::new(dealt, 4).with_local_window(None);
    let runs = |config: &DecoderConfig| {
        [1, 2, 3, 4].map(|number| config.block(number).attention.selection.turns)
    };
    assert_eq!(runs(&config), [3, 6, 12, 24].map(Some));
    let local = config.with_local_window(Some(8));
    assert_eq!(runs(&local), [None, Some(3), None, Some(6)]);
    for (index, layer) in layers(&local).into_iter().enumerate() {
        let odd = index % 2 == 0;
        let window = if odd { 8 } else { 16 };
        assert_eq!(layer.options().keep_window, Some(window));
        assert_eq!(layer.rope.is_some(), odd);
    }
}

#[test]
fn named_layers_attend_to_all_keys_where_others_keep_some() {
    for attention in [attention(), last_keys(&attention(), Some(16))] {
        let config = DecoderConfig::new(attention, 2)
            .with_local_window(None)
            .with_dense_layers(vec![2]);
        let layers = layers(&config).into_iter();
        let windows = layers.map(|layer| layer.options().keep_window);
        assert!(windows.eq([Some(16), None]));
    }
}

#[test]
fn what_it_generates_is_the_most_likely_of_the_whole_pass() {
    for local in [None, Some(8)] {
        let config = DecoderConfig::new(attention(), 2).with_local_window(local);
        let model = config.init(&Device::flex()).for_generation();
        assert_eq!(model.vocabulary(), 256);
        let prompt: Vec<u32> = (0..20).collect();
        let generator = Generator::new(&model).with_max_new(6);
        let written = generator.try_generate(&[prompt]).expect("it fits");
        let mut whole = text(20);
        for &token in &written[0].tokens {
            let [_, len] = whole.dims();
            let last: Tensor<3> = model.forward(whole.clone()).narrow(1, len - 1, 1);
            let next: Tensor<2, Int> = last.argmax(2).flatten(1, 2);
            whole = Tensor::cat(vec![whole, next.clone()], 1);
            assert_eq!(next.into_scalar::<i64>(), i64::from(token));
        }
    }
}

#[test]
fn texts_lengthen_by_doubling_and_then_stay() {
    let divisors = |share: &str, tokens| {
        let share: Curriculum = share.parse().unwrap();
        [0, 24, 25, 49, 50, 99].map(|step| share.divisor(tokens, step, 100))
    };
    assert_eq!(divisors("0.5", 256), [4, 4, 2, 2, 1, 1]);
    assert_eq!(divisors("0.5", 300), [4, 4, 2, 2, 1, 1]);
    for (share, tokens) in [("0.5", 64), ("0.5", 257), ("0", 256)] {
        assert_eq!(divisors(share, tokens), [1; 6]);
    }
}

#[test]
fn windows_narrow_by_halves_and_then_stay() {
    let windows = |share: &str, window| {
        let share: Curriculum = share.parse().unwrap();
        [0, 24, 25, 49, 50, 99].map(|step| share.window(window, 256, step, 100))
    };
    assert_eq!(windows("0.5", 32), [128, 128, 64, 64, 32, 32]);
    assert_eq!(windows("0.5", 40), [128, 128, 128, 128, 40, 40]);
    assert_eq!(windows("0", 32), [32; 6]);
    for window in [100, 128, 256, 300] {
        assert_eq!(windows("0.5", window), [window; 6]);
    }
}

#[test]
fn stages_divide_the_share_of_a_training_evenly() {
    let stages = |share: &str, stages| {
        let share: Curriculum = share.parse().unwrap();
        [0, 24, 25, 49, 50, 99].map(|step| share.stage(stages, step, 100))
    };
    let [first, second] = [Some(0), Some(1)];
    assert_eq!(stages("0.5", 2), [first, first, second, second, None, None]);
    assert_eq!(stages("0.5", 0), [None; 6]);
    assert_eq!(stages("0", 2), [None; 6]);
    for text in ["1", "-0.1", "NaN", "half"] {
        assert!(text.parse::<Curriculum>().is_err(), "{text}");
    }
}

//! `testing::assert_causal`: causal layers pass, and a leak fails, with its position and element.

use crate::case::data;
use crate::layer::{self, Groups, tokens as features};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::Attention;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, QkNorm, Rope};
use burn_flash_dma::testing::{CausalError, Change, Leak, assert_causal, try_assert_causal};

fn config() -> DynamicMaskAttentionConfig {
    layer::config()
        .selection(|s| s.with_window(Some(11)))
        .with_rope(Some(Rope::new(128)))
}

fn input(len: usize) -> Tensor<3> {
    features(2, len, &Device::flex())
}

fn leak<const D: usize>(model: impl Fn(Tensor<3>) -> Tensor<D>, input: Tensor<3>) -> Leak {
    match try_assert_causal(model, input, 1e-5) {
        Err(CausalError::Leak(leak)) => leak,
        other => panic!("{other:?} instead of a leak"),
    }
}

#[test]
fn causal_layers_pass() {
    let device = Device::flex();
    for config in [
        config(),
        config()
            .selection(|s| s.with_window(None))
            .with_n_kv_heads(None),
        config()
            .with_qk_norm(QkNorm::None)
            .logits(|l| l.with_softcap(Some(5.0))),
    ] {
        let (first, second) = (config.init(&device), config.init(&device));
        let model = |x: Tensor<3>| {
            let x = x.clone() + first.forward(x);
            x.clone() + second.forward(x)
        };
        let report = try_assert_causal(model, input(100), 1e-5).unwrap();
        assert_eq!(report.positions, [1, 25, 50, 63, 64, 75, 99]);
        assert_eq!(report.changes.len(), 3);
        assert!(report.worst <= 1e-5, "{report:?}");
    }
}

#[test]
fn causal_layers_pass_in_16_bits() {
    for dtype in [DType::F16, DType::BF16] {
        let model = |x: Tensor<3>| {
            let heads = |x: Tensor<3>| x.reshape([2, 70, 4, 8]).swap_dims(1, 2);
            let x = heads(x);
            Attention::new(x.clone(), x.clone(), x)
                .forward()
                .swap_dims(1, 2)
        };
        assert_causal(model, input(70).cast(dtype), 2e-2);
    }
}

#[test]
fn a_layer_without_causal_masking_leaks_from_the_first_position_on() {
    let layer = config()
        .logits(|l| l.with_causal(false))
        .init(&Device::flex());
    let leak = leak(|x| layer.forward(x), input(40));
    assert_eq!((leak.position, leak.first), (1, 0));
    assert_eq!(leak.len, 2 * 32);
    assert!(leak.changed > 0 && (leak.before - leak.after).abs() > leak.allowed);
}

#[test]
#[should_panic(
    expected = "the output at position 0 depends on later tokens: with the input changed from position 1 on"
)]
fn a_mean_over_all_tokens_panics_with_the_first_position() {
    let model = |x: Tensor<3>| x.clone() + x.mean_dim(1);
    assert_causal(model, input(20), 1e-5);
}

/// Looks one token ahead, in one feature of one sequence: the index names it.
#[test]
fn the_worst_element_is_named() {
    let model = |x: Tensor<3>| {
        let next = x.clone().slice([1..2, 10..11, 7..8]);
        let changed = x.clone().slice([1..2, 9..10, 3..4]) + next;
        x.slice_assign([1..2, 9..10, 3..4], changed)
    };
    let leak = leak(model, input(20));
    assert_eq!((leak.position, leak.first, leak.changed), (10, 9, 1));
    assert_eq!((leak.index, leak.len), (vec![1, 9, 3], 2 * 10 * 32));
}

/// A mask that subtracts a number from logits hides ordinary values and lets huge ones through.
#[test]
fn a_mask_of_finite_logits_fails_at_huge_values() {
    let later = Tensor::<2>::ones([20, 20], &Device::flex()).triu(1);
    let later = later.unsqueeze::<3>();
    let model = |x: Tensor<3>| {
        let logits = x.clone().matmul(x.clone().swap_dims(1, 2));
        softmax(logits - later.clone() * 1e4, 2).matmul(x)
    };
    let leak = leak(model, input(20));
    let huge = matches!(leak.change, Change::Features(x) if x.abs() == 1e30);
    assert!(huge, "{leak}");
    assert!(!leak.after.is_finite() || leak.after.abs() > 1e20, "{leak}");
}

fn tokens(len: usize) -> Tensor<2, Int> {
    let tokens = (0..2 * len as i64).map(|n| n * n % 13);
    Tensor::from_data(data(tokens, [2, len]), &Device::flex())
}

#[test]
fn models_of_tokens_are_checked_by_other_tokens() {
    let device = Device::flex();
    let embedding: Embedding = EmbeddingConfig::new(13, 32).init(&device);
    let causal = config().init(&device);
    let model = |x: Tensor<2, Int>| causal.forward(embedding.forward(x));
    let report = try_assert_causal(model, tokens(30), 1e-5).unwrap();
    assert_eq!(report.changes, [Change::Token(0), Change::Token(12)]);

    let full = config().logits(|l| l.with_causal(false)).init(&device);
    let model = |x: Tensor<2, Int>| full.forward(embedding.forward(x));
    let error = try_assert_causal(model, tokens(30), 1e-5).unwrap_err();
    let what = "position 0 depends on later tokens";
    assert!(error.to_string().contains(what), "{error}");
}

#[test]
fn what_a_check_cannot_decide_is_refused() {
    let same = |x: Tensor<3>| x;
    let short = try_assert_causal(same, input(1), 1e-5);
    assert_eq!(short, Err(CausalError::Short { batch: 2, len: 1 }));

    let last = |x: Tensor<3>| x.narrow(1, 19, 1);
    let shape = try_assert_causal(last, input(20), 1e-5);
    let (output, batch, len) = (vec![2, 1, 32], 2, 20);
    assert_eq!(shape, Err(CausalError::Shape { output, batch, len }));

    let fixed = input(20);
    let blind = try_assert_causal(|_: Tensor<3>| fixed.clone(), input(20), 1e-5);
    assert_eq!(blind, Err(CausalError::Blind));

    let one = tokens(9).full_like(5);
    let one = try_assert_causal(|x: Tensor<2, Int>| x.float(), one, 1e-5);
    assert_eq!(one, Err(CausalError::OneToken { token: 5 }));
}

/// An element that is NaN before the change may be so after it, and no other.
#[test]
fn nan_is_no_number() {
    let everywhere = |x: Tensor<3>| x.zeros_like().add_scalar(f32::NAN);
    let blind = try_assert_causal(everywhere, input(9), 1e-5);
    assert_eq!(blind, Err(CausalError::Blind));
    let spread = |x: Tensor<3>| x.clone() + x.mul_scalar(1e30).sum_dim(1) * 0.0;
    let leak = leak(spread, input(9));
    assert!(leak.after.is_nan() && leak.before.is_finite(), "{leak}");
}

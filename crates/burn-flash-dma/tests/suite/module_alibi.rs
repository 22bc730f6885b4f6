//! ALiBi of the layers: as a bias of pairs, in configurations, and refused by caches.

use crate::case::{data, grad, near, tracked, uniform, values};
use crate::layer::{Groups, WIDTH, broken, reread};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskInput, MaskedAttentionLayerConfig, MaskedInput,
    Selection,
};
use burn_flash_dma::{AlibiSlopes, AttentionError, Documents};

const LEN: usize = 21;

/// ALiBi bias of the logits of a sequence with `heads` heads.
fn bias(heads: usize, device: &Device) -> Tensor<4> {
    let slopes = AlibiSlopes::standard(heads).values().iter();
    let pairs = slopes.flat_map(|slope| {
        (0..LEN as i32)
            .flat_map(move |i| (0..LEN as i32).map(move |j| -slope * (i - j).abs() as f32))
    });
    Tensor::from_data(data(pairs, [1, heads, LEN, LEN]), device)
}

fn close(actual: Tensor<3>, expected: Tensor<3>) {
    near(&values(actual), &values(expected), 1e-5, "out");
}

#[test]
fn a_masked_layer_adds_it_as_a_bias_of_pairs() {
    let device = Device::flex().autodiff();
    for causal in [true, false] {
        let config = MaskedAttentionLayerConfig::new(WIDTH, 6).with_head_dim(Some(8));
        let config = config.with_causal(causal);
        let plain = config.init(&device);
        let sloped = config.with_alibi(Some(AlibiSlopes::standard(6)));
        let layer = sloped.init(&device);
        let layer = layer.load_record(plain.clone().into_record());
        let x = tracked([2, LEN, WIDTH], &device);
        let by_slopes = layer.forward(x.clone());
        let by_bias = plain.forward(MaskedInput::new(x.clone()).bias(bias(6, &device)));
        close(by_slopes.clone(), by_bias.clone());
        let weights = uniform([2, LEN, WIDTH], &device);
        let gradient = |out: Tensor<3>| grad(&x, &(out * weights.clone()).sum().backward());
        near(&gradient(by_slopes), &gradient(by_bias), 1e-5, "dx");
    }
}

#[test]
fn a_dynamic_mask_layer_passes_it_on_with_every_input() {
    let device = Device::flex().autodiff();
    let config = DynamicMaskAttentionConfig::new(WIDTH, 4).with_selection(Selection::keep(5));
    let slopes = AlibiSlopes::standard(4);
    let config = config.logits(|l| l.with_alibi(Some(slopes)));
    let layer = config.init(&device);
    assert_eq!(layer.options().alibi, Some(slopes));
    let x = tracked([2, LEN, WIDTH], &device);
    let whole = layer.forward(x.clone());
    // Distances within a document are those of the document alone.
    let packed = DynamicMaskInput::new(x.clone())
        .documents(Documents::from_lengths([vec![9, 12], vec![9, 12]]));
    let packed = layer.forward(packed);
    let alone = |first: usize, len: usize| layer.forward(x.clone().narrow(1, first, len));
    close(packed.clone().narrow(1, 0, 9), alone(0, 9));
    close(packed.narrow(1, 9, 12), alone(9, 12));
    close(whole.narrow(1, 0, 9), alone(0, 9));
}

#[test]
fn configurations_keep_it_and_refuse_slopes_of_other_heads() {
    let device = Device::flex();
    let config = DynamicMaskAttentionConfig::new(WIDTH, 4);
    let saved = config
        .clone()
        .logits(|l| l.with_alibi(Some(AlibiSlopes::standard(3))));
    let loaded = reread(&saved);
    assert_eq!(loaded.logits, saved.logits);
    let (slopes, q_heads) = (3, 4);
    let refused = AttentionError::AlibiHeads { slopes, q_heads };
    assert_eq!(loaded.try_init(&device).unwrap_err(), refused);
    let masked = MaskedAttentionLayerConfig::new(WIDTH, 4).with_alibi(saved.logits.alibi);
    assert_eq!(masked.try_init(&device).unwrap_err(), refused);
    // JSON has no number that is not finite, but one that f32 does not hold.
    assert!(broken(&saved, "0.0625", "1e39"));
}

#[test]
fn caches_refuse_it_before_they_are_made() {
    for selection in [Selection::new(), Selection::keep(8)] {
        let layer = DynamicMaskAttentionConfig::new(WIDTH, 4)
            .with_selection(selection)
            .logits(|l| l.with_alibi(Some(AlibiSlopes::standard(4))))
            .init(&Device::flex());
        let error = layer.try_init_cache(1).unwrap_err();
        assert_eq!(error, AttentionError::CacheAlibi);
    }
}

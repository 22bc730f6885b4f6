//! Packed documents and padded batches, as in the book.

use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, Selection};
use burn_flash_dma::{
    Attention, AttentionError, AttentionMask, AttentionOptions, Documents, PackedAttention,
    Selector,
};

pub fn main() -> Result<(), AttentionError> {
    let device = Device::flex();
    let normal = Distribution::Normal(0.0, 1.0);

    // ANCHOR: packed
    // Three documents, one after another: 40, 25 and 35 tokens.
    let documents = Documents::try_from_cu_seqlens(&[0, 40, 65, 100])?;
    let rows = |heads| Tensor::<3>::random([100, heads, 32], normal, &device);
    let (q, k, v) = (rows(4), rows(2), rows(2));
    let scores = Tensor::<2>::random([100, 2], normal, &device);
    let call = || PackedAttention::new(q.clone(), k.clone(), v.clone(), &documents);

    let dense = call().forward();
    let sparse = call()
        .scores(scores)
        .selector(Selector::top(16).recent(4))
        .forward();
    let both_ways = call()
        .options(AttentionOptions::new().with_causal(false))
        .forward();

    // The last 5 queries of the first document, none of the second, and one of the third.
    let queries = Documents::try_from_cu_seqlens(&[0, 5, 5, 6])?;
    let six = Tensor::<3>::random([6, 4, 32], normal, &device);
    let few = PackedAttention::new(six, k.clone(), v.clone(), &documents)
        .query_documents(&queries)
        .forward();
    // ANCHOR_END: packed
    for out in [&dense, &sparse, &both_ways] {
        assert_eq!(out.dims(), [100, 4, 32]);
    }
    assert_eq!(few.dims(), [6, 4, 32]);
    // The last document alone.
    let alone = |rows: Tensor<3>| rows.narrow(0, 65, 35).swap_dims(0, 1).unsqueeze::<4>();
    let alone = Attention::new(alone(q), alone(k), alone(v)).forward();
    let alone = alone.squeeze_dim::<3>(0).swap_dims(0, 1);
    let far = (dense.narrow(0, 65, 35) - alone).abs().max();
    assert!(far.into_scalar::<f32>() < 1e-5);
    println!("packed: the last document gets the rows that it gets alone");

    // ANCHOR: padded
    // Two sequences of a batch of 20 tokens; the second has 13, and 7 of padding.
    let documents = Documents::try_from_padded([20, 13], 20)?;
    let rows = |heads| Tensor::<4>::random([2, heads, 20, 32], normal, &device);
    let intervals = documents.intervals([2, 2, 20], &device);
    let out = Attention::new(rows(4), rows(2), rows(2))
        .intervals(&intervals)
        .forward();
    // ANCHOR_END: padded
    assert_eq!(out.dims(), [2, 4, 20, 32]);
    let of_padding = out.slice([1..2, 0..4, 13..20]).abs().max();
    let of_padding = of_padding.into_scalar::<f32>();
    assert_eq!(of_padding, 0.0);
    println!("padded: rows of padding are {of_padding}");

    // ANCHOR: layer
    let config = DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8));
    let layer = config.init(&device);
    let x = Tensor::<3>::random([2, 20, 32], normal, &device);
    // No query of the first sequence sees its third key.
    let mut shown = [[true; 20]; 2];
    shown[0][2] = false;
    let shown = Tensor::<2, burn::tensor::Bool>::from_data(shown, &device);
    let mask = AttentionMask::visible(shown.reshape([2, 1, 1, 20]));
    let input = DynamicMaskInput::new(x).lengths([20, 13]).mask(mask);
    let out = layer.forward(input);
    // ANCHOR_END: layer
    assert_eq!(out.dims(), [2, 20, 32]);
    println!("layer: {:?}", out.dims());
    Ok(())
}

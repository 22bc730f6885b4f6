//! The masks of the book, and attention under one of them with a learned bias.

use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_dma::{AttentionMask, BlockRule, KeyRanges, MaskedAttention, TilePlan};

/// Pairs that a mask shows.
fn pairs(mask: &AttentionMask) -> i64 {
    let shown = mask.clone().into_visible().int().sum();
    shown.into_scalar::<i64>()
}

pub fn main() {
    let device = Device::flex();
    let none = f32::NEG_INFINITY;
    let scores = [
        0.5, 0.2, 0.9, 0.3, 0.6, 0.1, 0.4, 0.7, 0.6, 0.2, none, 0.5, 0.3, 0.8, 0.4, 0.65,
    ];
    let bias = Tensor::<1>::from_data(scores, &device).reshape([1, 1, 1, 16]);

    // ANCHOR: builders
    let causal = AttentionMask::causal([16, 16], &device);
    let window = AttentionMask::sliding_window([16, 16], 5, &device);
    let padding = AttentionMask::padding(Tensor::<1, Int>::from_data([11], &device), 16);
    let ids = [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]];
    let documents = AttentionMask::documents(Tensor::<2, Int>::from_data(ids, &device));
    let top = AttentionMask::top(bias.clone(), 4, 16, Some(causal.clone()));
    let above = AttentionMask::above(bias, 0.45);
    let any = top.clone().in_key_blocks(4, BlockRule::Any);
    let majority = top.clone().in_key_blocks(4, BlockRule::Majority);
    // Axes of size 1 broadcast: documents with padding.
    let both = documents.clone().and(padding.clone());
    // ANCHOR_END: builders

    // The pairs of the pictures; `padding` and `above` are one row for all queries.
    let rows = [(&padding, 16), (&above, 16)].map(|(mask, rows)| pairs(mask) * rows);
    assert_eq!(rows, [176, 128]);
    assert_eq!([&causal, &window, &documents].map(pairs), [136, 70, 90]);
    assert_eq!([&top, &any, &majority].map(pairs), [58, 144, 16]);
    assert_eq!(both.dims(), [1, 1, 16, 16]);

    // ANCHOR: attend
    let device = device.autodiff();
    let normal = Distribution::Normal(0.0, 1.0);
    let random = |heads| Tensor::<4>::random([2, heads, 256, 32], normal, &device);
    let (q, k, v) = (random(4), random(2), random(2));
    // A learned bias for each key of each kv head, and documents of 100 tokens.
    let bias = Tensor::<4>::random([1, 2, 1, 256], normal, &device).require_grad();
    let ids = Tensor::<1, Int>::arange(0..256, &device).div_scalar(100);
    let mask = AttentionMask::documents(ids.reshape([1, 256]));

    // Made once for all layers: bits and counts, an eighth of the mask.
    let plan = TilePlan::new(mask, [256, 256], true);
    let mut x = q;
    for _layer in 0..2 {
        x = MaskedAttention::new(x, k.clone(), v.clone())
            .plan(&plan)
            .bias(bias.clone())
            .forward();
    }
    let grads = x.sum().backward();
    let grad = bias.grad(&grads).expect("the bias is tracked");
    // ANCHOR_END: attend
    assert_eq!(grad.dims(), [1, 2, 1, 256]);
    let counts = plan.counts().clone().into_data();
    let counts: Vec<i64> = counts.iter().collect();
    let empty = counts.iter().filter(|&&count| count == 0).count();
    println!("{} of {} blocks are empty", empty, counts.len());

    // ANCHOR: ranges
    // Documents of 100 tokens, in which each token sees the last 30: two numbers a query.
    let device = Device::flex();
    let ids = Tensor::<1, Int>::arange(0..256, &device).div_scalar(100);
    let ids = ids.reshape([1, 256]);
    let ranges =
        KeyRanges::documents(ids.clone()).and(KeyRanges::sliding_window([256, 256], 30, &device));
    let plan = TilePlan::from_ranges(ranges, [256, 256], true);

    // The same keys as a mask take 256 times 256.
    let mask =
        AttentionMask::documents(ids).and(AttentionMask::sliding_window([256, 256], 30, &device));
    let same = TilePlan::new(mask, [256, 256], true);
    // ANCHOR_END: ranges
    let [plan, same] = [plan, same].map(|plan| plan.counts().clone().into_data());
    assert_eq!(plan, same);
}

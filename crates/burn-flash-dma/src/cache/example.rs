use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::cache::DynamicMaskCacheConfig;
use burn_flash_dma::{AttentionOptions, dynamic_mask_attention};

let device = Device::flex();
let options = AttentionOptions::new().with_keep_window(16);
// One sequence, 2 key/value heads of 32 features; 16 keys each, however long the context.
let mut cache = DynamicMaskCacheConfig::new(1, 2, 32, options).init(&device);

let normal = Distribution::Normal(0.0, 1.0);
let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device);
let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
let scores = Tensor::<3>::random([1, 2, 100], normal, &device);
let tokens = |x: &Tensor<4>, from: usize, to: usize| x.clone().narrow(2, from, to - from);

// A prompt of 90 tokens at once, then ten tokens one by one.
let mut rows = Vec::new();
for (from, to) in std::iter::once((0, 90)).chain((90..100).map(|i| (i, i + 1))) {
    rows.push(cache.step(
        tokens(&q, from, to),
        tokens(&k, from, to),
        tokens(&v, from, to),
        scores.clone().narrow(2, from, to - from),
    ));
}
let decoded = Tensor::cat(rows, 2);
assert_eq!(cache.lengths(), [100]);
assert_eq!(cache.positions_sync()[0][0].len(), 16);

// Equal to attention over all hundred tokens.
let whole = dynamic_mask_attention(q, k, v, scores, options);
assert!((decoded - whole).abs().max().into_scalar::<f32>() < 1e-5);

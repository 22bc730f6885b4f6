//! Packed documents, padded batches and custom masks in a layer, as in the book.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskInput, Logits, Rope, Scores, Selection,
};
use burn_flash_dma::{
    AttentionError, AttentionMask, AttentionOptions, Documents, KeyRanges, MaskedAttention,
    PackedAttention, Selector, TilePlan,
};

const NORMAL: Distribution = Distribution::Normal(0.0, 1.0);

/// The greatest difference of two tensors.
fn distance<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    (a - b).abs().max().into_scalar()
}

pub fn main() -> Result<(), AttentionError> {
    let device = Device::flex().autodiff();
    device.seed(3);
    packed_layer(&device)?;
    packed_targets(&device)?;
    packed_tensors(&device)?;
    padded(&device);
    key_mask(&device);
    pair_mask(&device)?;
    shared_plan(&device);
    Ok(())
}

fn packed_layer(device: &Device) -> Result<(), AttentionError> {
    // ANCHOR: packed_layer
    // Three documents of 40, 25 and 35 tokens, one after another.
    let documents = Documents::try_from_cu_seqlens(&[0, 40, 65, 100])?;
    let config = DynamicMaskAttentionConfig::new(64, 4)
        .with_selection(Selection::keep(12).with_recent(Some(4)))
        .with_rope(Some(Rope::new(128)));
    let layer = config.init(device);
    let x = Tensor::<3>::random([1, 100, 64], NORMAL, device);
    let packed = layer.forward(DynamicMaskInput::new(x.clone()).documents(documents));

    // Each document gets the same rows as it gets alone.
    for (start, len) in [(0, 40), (40, 25), (65, 35)] {
        let alone = layer.forward(x.clone().narrow(1, start, len));
        let rows = packed.clone().narrow(1, start, len);
        assert!(distance(alone, rows) < 1e-5);
    }
    // ANCHOR_END: packed_layer
    println!("packed layer: three documents, the rows that each gets alone");
    Ok(())
}

fn packed_targets(device: &Device) -> Result<(), AttentionError> {
    let documents = Documents::try_from_cu_seqlens(&[0, 40, 65, 100])?;
    let logits = Tensor::<2>::random([100, 8], NORMAL, device).require_grad();
    let tokens: Vec<i32> = (0..100).map(|n| 1 + n % 7).collect();
    // ANCHOR: targets
    // Targets are the next tokens; the last one of a document has none, marked by 0.
    let mut targets = [&tokens[1..], &[0]].concat();
    let mut end = 0;
    for len in &documents.lengths()[0] {
        end += len;
        targets[end - 1] = 0;
    }
    let targets = Tensor::<1, Int>::from_data(&targets[..], device);
    let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0]));
    let loss = loss.init(device).forward(logits.clone(), targets);
    // ANCHOR_END: targets
    let grads = loss.backward();
    let grads = logits.grad(&grads).expect("the logits are tracked");
    let rows: Vec<f32> = grads.abs().sum_dim(1).into_data().iter().collect();
    let silent: Vec<usize> = (0..100).filter(|&row| rows[row] == 0.0).collect();
    assert_eq!(silent, [39, 64, 99]);
    println!("packed targets: rows {silent:?} have no gradient");
    Ok(())
}

fn packed_tensors(device: &Device) -> Result<(), AttentionError> {
    let random = |heads| Tensor::<3>::random([100, heads, 32], NORMAL, device);
    let (q, k, v) = (random(4), random(2), random(2));
    let documents = Documents::try_from_cu_seqlens(&[0, 40, 65, 100])?;
    // ANCHOR: packed_tensors
    // Only ranked, not added to the logits: the best 12 keys of the document, 4 of them recent.
    let scores = Tensor::<2>::random([100, 2], NORMAL, device);
    let rule = Selector::top(12).recent(4).documents(documents.clone());
    let intervals = rule.try_select(scores.clone().transpose().unsqueeze())?;
    let zeros = scores.zeros_like();
    let ranked = PackedAttention::new(q.clone(), k.clone(), v.clone(), &documents)
        .scores(zeros)
        .intervals(&intervals)
        .try_forward()?;

    // A bias that falls with the distance, within documents of any length.
    let places = Tensor::<1, Int>::arange(0..100, device).float();
    let distance = places.clone().reshape([1, 1, 1, 100]) - places.reshape([1, 1, 100, 1]);
    let biased = PackedAttention::new(q, k, v, &documents)
        .bias(distance.mul_scalar(0.1))
        .try_forward()?;
    // ANCHOR_END: packed_tensors
    assert_eq!((ranked.dims(), biased.dims()), ([100, 4, 32], [100, 4, 32]));
    let alive = intervals.stats().mean_alive;
    assert!(intervals.max_live() == 12 && alive < 12.0);
    println!("packed tensors: {alive:.2} keys at a position, 12 at most");
    Ok(())
}

fn padded(device: &Device) {
    let layer = DynamicMaskAttentionConfig::new(64, 4)
        .with_selection(Selection::keep(8))
        .init(device);
    let x = Tensor::<3>::random([2, 20, 64], NORMAL, device);
    // ANCHOR: padded
    // Two sequences of 20 and 13 tokens. Nothing in the padding has an effect, not even NaN.
    let padding = Tensor::<3>::full([1, 7, 64], f32::NAN, device);
    let x = x
        .slice_assign([1..2, 13..20, 0..64], padding)
        .require_grad();
    let input = DynamicMaskInput::new(x.clone()).lengths([20, 13]);
    let out = layer.forward(input);
    // Rows of padding are zeros and add nothing to a sum; a mean divides by the number of tokens.
    let loss = out.square().sum() / (20.0 + 13.0);
    let grads = loss.backward();
    // ANCHOR_END: padded
    let grad = x.grad(&grads).expect("the tokens are tracked");
    let of_padding = grad.clone().slice([1..2, 13..20, 0..64]);
    let [all, of_padding] = [grad, of_padding].map(|grad| grad.abs().sum().into_scalar::<f32>());
    assert!(all > 0.0 && all.is_finite() && of_padding == 0.0);
    println!("padded: the gradient of the padding is {of_padding}");
}

fn key_mask(device: &Device) {
    let layer = DynamicMaskAttentionConfig::new(64, 4)
        .with_selection(Selection::keep(8))
        .init(device);
    let x = Tensor::<3>::random([2, 20, 64], NORMAL, device);
    let plain = layer.forward(x.clone());
    // ANCHOR: key_mask
    // No query of either sequence sees the keys 5 to 9; each keeps the best 8 of the others.
    let keys = Tensor::<1, Int>::arange(0..20, device);
    let hidden = keys
        .clone()
        .greater_equal_elem(5)
        .bool_and(keys.lower_elem(10));
    let mask = AttentionMask::hidden(hidden.reshape([1, 1, 1, 20]));
    let out = layer.forward(DynamicMaskInput::new(x).mask(mask));
    // ANCHOR_END: key_mask
    let moved = |from| {
        let [plain, out] = [&plain, &out].map(|rows| rows.clone().narrow(1, from, 5));
        distance(plain, out)
    };
    assert!(moved(0) < 1e-6 && moved(5) > 1e-3);
    println!("mask of keys: the rows before the first hidden key are those without a mask");
}

fn pair_mask(device: &Device) -> Result<(), AttentionError> {
    let x = Tensor::<3>::random([1, 60, 64], NORMAL, device);
    // ANCHOR: pair_mask
    // The first 20 tokens see each other in both directions; the others are causal.
    let prefix = Tensor::<1, Int>::arange(0..60, device).lower_elem(20);
    let prefix = AttentionMask::visible(prefix.reshape([1, 1, 1, 60]));
    let mask = AttentionMask::causal([60, 60], device).or(prefix);
    let config = DynamicMaskAttentionConfig::new(64, 4)
        .with_scores(Scores::Added)
        .with_selection(Selection::keep(16))
        .with_logits(Logits::new().with_causal(false));
    let layer = config.init(device);
    let out = layer.try_forward(DynamicMaskInput::new(x.clone()).mask(mask.clone()))?;
    // ANCHOR_END: pair_mask
    // Change of the first row when a token changes: none from a token after the prefix.
    let moved = |at: usize| {
        let x = x.clone().slice_fill([0..1, at..at + 1, 0..64], 3.0);
        let moved = layer.forward(DynamicMaskInput::new(x).mask(mask.clone()));
        distance(out.clone().narrow(1, 0, 1), moved.narrow(1, 0, 1))
    };
    let [behind, within] = [20..60, 1..20].map(|at| at.map(moved).fold(0.0, f32::max));
    assert!(behind == 0.0 && within > 0.0);
    println!("mask of pairs: tokens behind the prefix move its first row by {behind}");
    Ok(())
}

fn shared_plan(device: &Device) {
    let random = |heads| Tensor::<4>::random([1, heads, 60, 32], NORMAL, device);
    let (q, k, v) = (random(4), random(2), random(2));
    // ANCHOR: shared_plan
    // The same mask without a tensor of pairs: a query sees `0 .. max(20, own position + 1)`.
    let ends = Tensor::<1, Int>::arange(1..61, device).clamp_min(20);
    let ends = ends.reshape([1, 1, 60]);
    let ranges = KeyRanges::new(ends.zeros_like(), ends);
    let plan = TilePlan::from_ranges(ranges, [60, 60], false);
    let mut x = q;
    for _layer in 0..2 {
        x = MaskedAttention::new(x, k.clone(), v.clone())
            .plan(&plan)
            .options(AttentionOptions::new().with_causal(false))
            .forward();
    }
    // ANCHOR_END: shared_plan
    assert_eq!(x.dims(), [1, 4, 60, 32]);
    let counts = plan.counts().clone().into_data();
    let pairs: i64 = counts.iter::<i64>().sum();
    assert_eq!(pairs, (1..=60).map(|end| end.max(20)).sum::<i64>());
    println!("plan: {pairs} pairs");
}

//! One packed tensor, probabilities, and merged parts of an attention, as in the book.

use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::{Attention, AttentionOptions, merge_attention};

pub fn main() {
    let device = Device::flex().autodiff();
    let normal = Distribution::Normal(0.0, 1.0);

    // ANCHOR: packed
    // Two sequences of 100 tokens; q, k and v of 4 heads with 64 features each, in one tensor.
    let qkv = Tensor::<5>::random([2, 100, 3, 4, 64], normal, &device).require_grad();
    let scores = Tensor::<3>::random([2, 4, 100], normal, &device);
    let call = Attention::from_qkv(qkv.clone())
        .scores(scores)
        .options(AttentionOptions::new().with_keep_window(16));
    let out = call.clone().forward();
    // A token's heads lie together in memory: this copies nothing either.
    let out = out.swap_dims(1, 2).reshape([2, 100, 256]);
    let gradients = out.sum().backward();
    assert_eq!(qkv.grad(&gradients).unwrap().dims(), [2, 100, 3, 4, 64]);
    // ANCHOR_END: packed

    // ANCHOR: probabilities
    // Attention probabilities of the last token in each head, [2, 4, 1, 100].
    let last = call.probabilities(&[99]);
    let attended = last.clone().greater_elem(0.0).int().sum_dim(3);
    assert!(attended.equal_elem(16).all().into_scalar::<bool>());
    let (most, key) = last.max_dim_with_indices(3);
    // ANCHOR_END: probabilities
    println!(
        "the last token attends most to key {} of the first head, with {:.2}",
        key.into_data().iter::<i64>().next().unwrap(),
        most.into_data().iter::<f32>().next().unwrap()
    );

    let rows = |heads, len| Tensor::<4>::random([1, heads, len, 64], normal, &device);
    // ANCHOR: merged
    // Ten new tokens attend to a prompt of 200 that is kept elsewhere, and causally to themselves.
    let (q, prompt, own) = (rows(4, 10), rows(2, 200), rows(2, 10));
    let all = AttentionOptions::new().with_causal(false);
    let first = Attention::new(q.clone(), prompt.clone(), prompt.clone()).options(all);
    let second = Attention::new(q.clone(), own.clone(), own.clone());
    let (out, lse) = merge_attention([first.forward_with_lse(), second.forward_with_lse()]);
    // ANCHOR_END: merged
    assert_eq!(lse.dims(), [1, 4, 10]);
    let keys = Tensor::cat(vec![prompt, own], 2);
    let whole = Attention::new(q, keys.clone(), keys).forward();
    assert!((out - whole).abs().max().into_scalar::<f32>() < 1e-5);
    println!("parts: merged, they are attention to all keys");
}

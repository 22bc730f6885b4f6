//! A backend without an engine of its own: the default bodies, through the same functions.
#![allow(deprecated)]

use crate::case::{cases, loss};
use burn::tensor::Device;
use burn_flash_dma::ElementType;

#[test]
fn values_and_gradients_match_the_oracle() {
    let device = Device::ndarray().autodiff();
    // NdArray has no 16-bit floats.
    for case in cases(&[ElementType::F32]) {
        let tensors = case.tensors(&device).track([true; 4]);
        let (out, lse) = tensors.attend_with_lse(case.options);
        case.check_forward(out.clone(), lse.clone());
        let total = loss(out, case.grad_out(&device)) + loss(lse, case.grad_lse(&device));
        case.check_gradients(tensors.gradients(&total.backward()), true);
    }
}

/// A cache on the default bodies: prompt, steps and a chunk, as one pass.
#[test]
fn a_cache_by_the_default_bodies() {
    use burn::tensor::{Distribution, Tensor};
    use burn_flash_dma::cache::DynamicMaskCacheConfig;
    use burn_flash_dma::{AttentionOptions, dynamic_mask_attention};
    let device = Device::ndarray();
    let options = AttentionOptions::new().with_keep_window(6);
    let random = |heads: usize| {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<4>::random([1, heads, 60, 8], normal, &device)
    };
    let (q, k, v) = (random(4), random(2), random(2));
    let scores = random(2).narrow(3, 0, 1).squeeze_dim::<3>(3);
    let mut cache = DynamicMaskCacheConfig::new(1, 2, 8, options).init(&device);
    let mut rows = Vec::new();
    for (at, count) in [(0, 20), (20, 1), (21, 3), (24, 30), (54, 6)] {
        let part = |x: &Tensor<4>| x.clone().narrow(2, at, count);
        let scores = scores.clone().narrow(2, at, count);
        rows.push(cache.step(part(&q), part(&k), part(&v), scores));
    }
    let decoded = crate::case::values(Tensor::cat(rows, 2));
    let whole = crate::case::values(dynamic_mask_attention(q, k, v, scores, options));
    for (decoded, whole) in decoded.iter().zip(&whole) {
        assert!((decoded - whole).abs() < 1e-5, "{decoded} is not {whole}");
    }
}

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

/// Sequences with the same pages, and with windows, on the default bodies.
#[test]
fn shared_pages_by_the_default_bodies() {
    use burn::tensor::{Distribution, Tensor};
    use burn_flash_dma::cache::{PagedCache, PagedCacheConfig};
    let device = Device::ndarray();
    let random = |batch: usize, heads: usize, tokens: usize| {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<4>::random([batch, heads, tokens, 8], normal, &device)
    };
    for window in [None, Some(7)] {
        let config = PagedCacheConfig::new(1, 2, 8, 200)
            .with_page_len(4)
            .with_window(window);
        let mut shared = config.init(&device);
        let (k, v) = (random(1, 2, 10), random(1, 2, 10));
        shared.append(k.clone(), v.clone(), None);
        let one = shared.clone();
        let mut apart = PagedCache::cat(vec![one.clone(), one]);
        assert_eq!(shared.fork(0), 1);
        assert!(shared.used_pages() < apart.used_pages());
        for count in [1, 1, 3, 20, 1] {
            let (q, k, v) = (
                random(2, 4, count),
                random(2, 2, count),
                random(2, 2, count),
            );
            let out = shared.step(q.clone(), k.clone(), v.clone(), None);
            let own = apart.step(q, k, v, None);
            assert_eq!(crate::case::values(out), crate::case::values(own));
        }
    }
}

//! A step writes its cache in place: tests outside the crate cannot see a tensor's address.

#![cfg(any(feature = "flex", all(feature = "cpu", feature = "fusion")))]

use super::*;
use crate::AttentionOptions;
use burn::tensor::{Device, Tensor};

/// Appends, decodes and attends over a chunk, and checks the address of the keys after each.
fn slots_stay(device: &Device, place: fn(Tensor<4>) -> usize) {
    let options = AttentionOptions::new().with_keep_window(6);
    let mut cache = DynamicMaskCacheConfig::new(2, 2, 16, options).init(device);
    let step = |cache: &mut DynamicMaskCache, tokens: usize| {
        let kv = || Tensor::<4>::ones([2, 2, tokens, 16], device);
        let _ = cache.step(kv(), kv(), kv(), Tensor::ones([2, 2, tokens], device));
    };
    // Fresh tensors may be padded, or shared, as zeros are.
    step(&mut cache, 1);
    let places = |cache: &DynamicMaskCache| {
        let state = cache.state();
        [place(state.k.clone()), place(state.v.clone())]
    };
    let before = places(&cache);
    for tokens in [1, 3, 20, 1] {
        step(&mut cache, tokens);
        assert_eq!(places(&cache), before, "{tokens} tokens");
    }
    cache.reset(1);
    let kv = || Tensor::<4>::ones([2, 2, 9, 16], device);
    cache.append(kv(), kv(), Tensor::ones([2, 2, 9], device));
    assert_eq!(places(&cache), before);
    // A step whose tokens wait writes nothing, so it copies nothing that a clone shares. Accepting them writes.
    let clone = cache.clone();
    for tokens in [3, 20] {
        cache.hold();
        step(&mut cache, tokens);
        assert_eq!(places(&cache), before, "{tokens} tokens wait");
        cache.accept(0);
    }
    assert_eq!(places(&clone), before);
    drop(clone);
    cache.hold();
    step(&mut cache, 3);
    cache.accept(2);
    assert_eq!(places(&cache), before);
    // A clone shares the tensors until one of the two is written.
    let clone = cache.clone();
    step(&mut cache, 1);
    assert_eq!(places(&clone), before);
    assert_ne!(places(&cache), before);
}

fn pages_stay(device: &Device, place: fn(Tensor<4>) -> usize) {
    let mut cache = PagedCacheConfig::new(2, 2, 16, 64)
        .with_page_len(16)
        .with_pages(8)
        .init(device);
    let step = |cache: &mut PagedCache, tokens: usize| {
        let kv = || Tensor::<4>::ones([2, 2, tokens, 16], device);
        let _ = cache.step(kv(), kv(), kv(), None);
    };
    step(&mut cache, 1);
    let places = |cache: &PagedCache| {
        let rows = &cache.state().rows;
        [place(rows.k.clone()), place(rows.v.clone())]
    };
    let before = places(&cache);
    for tokens in [1, 3, 20, 1] {
        step(&mut cache, tokens);
        assert_eq!(places(&cache), before, "{tokens} tokens");
    }
    let clone = cache.clone();
    cache.hold();
    step(&mut cache, 3);
    assert_eq!(places(&cache), before);
    drop(clone);
    cache.accept(2);
    assert_eq!(places(&cache), before);
    // Tokens beyond a decode step are written past the end.
    cache.hold();
    step(&mut cache, 20);
    cache.accept(0);
    assert_eq!(places(&cache), before);
    // The pool stays in place when a page is shared and when it is copied.
    cache.reorder(&[0, 0]);
    let used = cache.used_pages();
    step(&mut cache, 1);
    assert_eq!(cache.used_pages(), used + 1, "a copy of the last page");
    assert_eq!(places(&cache), before);
}

#[cfg(feature = "flex")]
fn flex_place(tensor: Tensor<4>) -> usize {
    let tensor = tensor.try_into_primitive::<burn::backend::Flex>().unwrap();
    tensor.bytes().as_ptr() as usize
}

#[cfg(feature = "flex")]
#[test]
fn flex_writes_in_place() {
    slots_stay(&Device::flex(), flex_place);
    pages_stay(&Device::flex(), flex_place);
}

/// Address of the description of a fused tensor's memory: another description is another allocation.
#[cfg(all(feature = "cpu", feature = "fusion"))]
fn fused_place(tensor: Tensor<4>) -> usize {
    use burn::backend::fusion::Fusion;
    use burn_cubecl::CubeBackend;
    let tensor = tensor.try_into_primitive::<Fusion<CubeBackend>>().unwrap();
    let client = tensor.client.clone();
    let tensor = client.resolve_tensor_float::<CubeBackend>(tensor);
    std::ptr::from_ref(tensor.handle.memory.descriptor()) as usize
}

#[cfg(all(feature = "cpu", feature = "fusion"))]
#[test]
fn kernels_write_in_place_under_fusion() {
    slots_stay(&Device::cpu(), fused_place);
    pages_stay(&Device::cpu(), fused_place);
}

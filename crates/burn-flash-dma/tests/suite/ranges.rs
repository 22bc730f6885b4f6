//! Ranges of keys: the pairs they show, and refusals. The workspace's `tests` compare their plans with those of
//! masks.

use crate::case::{data, grad, ints, random, refused, refused_as, values};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::{AttentionMask, KeyRanges, MaskedAttention, TilePlan};

/// Values and gradients on a tracking device.
#[test]
fn a_plan_of_ranges_serves_as_its_mask_does() {
    let device = Device::flex().autodiff();
    let [q, k, v] = [4, 2, 2].map(|heads| random([1, heads, 90, 16], &device).require_grad());
    let mask = AttentionMask::sliding_window([90, 90], 20, &device);
    let ranges = KeyRanges::sliding_window([90, 90], 20, &device);
    let plan = TilePlan::from_ranges(ranges, [90, 90], true);
    let attention = MaskedAttention::new(q.clone(), k.clone(), v.clone());
    let masked = attention.clone().mask(mask).forward();
    let planned = attention.plan(&plan).forward();
    let [by_mask, by_ranges] = [masked, planned].map(|out| {
        let grads = (out.clone() * out.clone()).sum().backward();
        let grads = [&q, &k, &v].map(|t| grad(t, &grads));
        (values(out.inner()), grads)
    });
    assert!(by_mask == by_ranges);
}

#[test]
fn any_integers_and_no_tokens_are_served() {
    let device = Device::flex();
    let long = |n: i64| Tensor::<3, Int>::from_data(data([n], [1; 3]), (&device, DType::I64));
    for (first, end, count) in [(-1 << 40, 1 << 40, 15), (1 << 32, 1 << 33, 0)] {
        let ranges = KeyRanges::new(long(first), long(end));
        let plan = TilePlan::from_ranges(ranges, [3, 5], false);
        assert_eq!(ints(plan.counts().clone()), [count]);
    }
    for (batch, len, counts) in [(2, 1, vec![1, 1]), (2, 0, vec![]), (0, 5, vec![])] {
        let ids = Tensor::<2, Int>::zeros([batch, len], &device);
        let plan = TilePlan::from_ranges(KeyRanges::documents(ids), [len, len], true);
        assert_eq!(plan.geometry().mask, [batch, 1, len, len]);
        assert_eq!(ints(plan.counts().clone()), counts);
    }
}

#[test]
fn a_document_that_comes_back_is_another_one() {
    let ids = Tensor::<2, Int>::from_data([[7, 7, 0, 7, 7]], &Device::flex());
    let plan = TilePlan::from_ranges(KeyRanges::documents(ids), [5, 5], false);
    // Two words per query, the second of which has no keys.
    let rows = [0b00011, 0, 0b00011, 0, 0b00100, 0, 0b11000, 0, 0b11000, 0];
    assert_eq!(ints(plan.bits().clone()), rows);
    assert_eq!(ints(plan.counts().clone()), [9]);
}

#[test]
fn bad_ranges_are_refused_by_tensor_and_axis() {
    let device = Device::flex();
    let plan = |first: [usize; 3], end: [usize; 3], lengths| {
        let [first, end] = [first, end].map(|shape| Tensor::<3, Int>::zeros(shape, &device));
        TilePlan::try_from_ranges(KeyRanges::new(first, end), lengths, true)
    };
    let text = "first of the key ranges must have size 1 or 5 on axis 2, but has 4";
    refused_as(plan([1, 1, 4], [1, 1, 5], [5, 9]), text);
    let text = "end of the key ranges must have size 1 or 2 on axis 1, but has 3";
    refused_as(plan([1, 2, 5], [1, 3, 1], [5, 9]), text);
    refused(plan([1; 3], [1; 3], [5, 1 << 31]), "TooLarge");
}

#[test]
#[should_panic(expected = "end of the key ranges must have size 1 or 5 on axis 2, but has 9")]
fn the_plain_form_panics_with_the_text_of_the_error() {
    let [first, end] = [1, 9].map(|keys| Tensor::zeros([1, 1, keys], &Device::flex()));
    let ranges = KeyRanges::new(first, end);
    let _ = TilePlan::from_ranges(ranges, [5, 9], true);
}

#[test]
#[should_panic(expected = "ranges of shapes [1, 1, 2] and [1, 1, 3] do not broadcast on axis 2")]
fn ranges_of_other_queries_do_not_meet() {
    let [two, three] = [2, 3].map(|len| KeyRanges::sliding_window([len, 9], 4, &Device::flex()));
    let _ = two.and(three);
}

//! Tests specific to `burn-flash-dma`: training the bias alone, reused plans, and builders of masks and ranges.

use burn::tensor::{Int, Tensor, TensorData};
use burn_flash_dma::{AttentionMask, KeyRanges, TilePlan};
use flash_dma_reference::compare::{GRADIENT, compare};
use flash_dma_tests::masked::plans::{Plan, read};
use flash_dma_tests::prelude::*;

fast_burn!(the_bias_alone, one_plan_for_two_calls);
every_burn!(builders_of_ranges_and_masks_agree, runs_of_many_tokens);

fn the_bias_alone<B: Backend>(burn: &Burn<B>) {
    for (bias, element) in [
        ([1, 2, 1, 70], F32),
        ([2, 4, 30, 70], Bf16),
        ([1, 4, 1, 1], F16),
        ([2, 1, 30, 1], F32),
    ] {
        let case = MaskedCase::new([2, 4, 2, 30, 70, 64])
            .element(element)
            .mask([1, 2, 30, 70], Pattern::Random(0.5))
            .bias(bias)
            .causal(true);
        let inputs = case.inputs();
        let grads = case.gradients(&inputs);
        let (grad_out, grad_lse) = grads.parts();
        let exact = inputs.backward(grad_out, grad_lse).bias;
        let (_, naive) = inputs.naive_backward(grad_out, grad_lse);
        let (exact, naive) = exact.zip(naive).expect("there is a bias");
        let actual = burn.bias_alone(&case.call(&inputs));
        compare("dbias", &bias, &actual, &exact, &naive, F32, GRADIENT).expect("the bias alone");
    }
}

fn one_plan_for_two_calls<B: Backend>(burn: &Burn<B>) {
    for (causal, hidden) in [(true, false), (false, true)] {
        let mut case = MaskedCase::new([2, 4, 2, 50, 130, 64])
            .element(Bf16)
            .mask([2, 2, 50, 130], Pattern::Random(0.3))
            .bias([1, 1, 1, 130])
            .causal(causal);
        case.hidden = hidden;
        let call = case.call(&case.inputs());
        let expected = burn.masked_forward(&call).expect("a good case").out;
        let [first, second] = burn.twice_with_plan(&call);
        assert!(first == expected && second == expected, "{case:?}");
    }
}

fn builders_of_ranges_and_masks_agree<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let same = |mask: AttentionMask, ranges: KeyRanges, lengths: [usize; 2]| {
        for causal in [false, true] {
            let (mask, ranges) = (mask.clone(), ranges.clone());
            let mask = TilePlan::new(mask, lengths, causal);
            let ranges = TilePlan::from_ranges(ranges, lengths, causal);
            let geometry = *ranges.geometry();
            assert_eq!(mask.geometry(), &geometry);
            let [mask, ranges] = [&mask, &ranges].map(|plan| read(plan).specified(&geometry));
            assert_eq!(mask, ranges, "{geometry:?}");
        }
    };
    for lengths in [[19, 70], [70, 19], [40, 40]] {
        for window in [0, 1, 7, 65, usize::MAX] {
            same(
                AttentionMask::sliding_window(lengths, window, device),
                KeyRanges::sliding_window(lengths, window, device),
                lengths,
            );
        }
        let padding = Tensor::<1, Int>::from_data([0, 11, lengths[1] as i32], device);
        same(
            AttentionMask::padding(padding.clone(), lengths[1]),
            KeyRanges::padding(padding),
            lengths,
        );
    }
    for len in [1, 2, 9, 75] {
        let ids: Vec<i32> = (0..3 * len as i32)
            .map(|n| [n % len as i32 / 7, n % len as i32, 4][n as usize / len])
            .collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [3, len]), device);
        let lengths = [len, len];
        let masks = || AttentionMask::documents(ids.clone());
        let ranges = || KeyRanges::documents(ids.clone());
        same(masks(), ranges(), lengths);
        // Both at once, and in both orders.
        let window = AttentionMask::sliding_window(lengths, 5, device);
        let near = KeyRanges::sliding_window(lengths, 5, device);
        same(
            masks().and(window.clone()),
            ranges().and(near.clone()),
            lengths,
        );
        same(window.and(masks()), near.and(ranges()), lengths);
    }
}

/// Documents for which the running maximum takes several pieces, and one whose id comes back.
fn runs_of_many_tokens<B: Backend>(burn: &Burn<B>) {
    let len = 700;
    let mut rng = Rng::new(3);
    let mut id = 0;
    let ids: Vec<i32> = (0..2 * len)
        .map(|n| {
            if n % len == 0 || rng.below(150) == 0 {
                id = (id + 1) % 3;
            }
            id
        })
        .collect();
    let tensor = Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [2, len]), burn.device());
    let plan = TilePlan::from_ranges(KeyRanges::documents(tensor), [len, len], true);
    let mut runs = vec![0; 2 * len];
    for n in 1..2 * len {
        let same = n % len > 0 && ids[n] == ids[n - 1];
        runs[n] = runs[n - 1] + usize::from(!same);
    }
    let geometry = plan.geometry();
    let expected = Plan::expected(geometry, |[b, _, i, j]| {
        runs[b * len + i] == runs[b * len + j]
    });
    assert!(read(&plan).specified(geometry) == expected);
}

//! Attention under masks and biases: the plan, the graph, and refusals. The workspace's `tests` compare the engines
//! themselves with the oracle.

use crate::case::{dtype, random, refused, refused_as, values};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_flash_dma::{
    AttentionError, AttentionMask, AttentionOptions, ElementType, MaskedAttention, TilePlan,
};

const SIZES: [usize; 6] = [2, 4, 2, 19, 70, 8];

/// q, k, v of `[2, 4, 19, 8]` queries and `[2, 2, 70, 8]` keys.
fn rows(device: &Device) -> [Tensor<4>; 3] {
    let [b, hq, hkv, nq, nk, d] = SIZES;
    [[b, hq, nq, d], [b, hkv, nk, d], [b, hkv, nk, d]].map(|shape| random(shape, device))
}

fn shown(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    random(shape, device).greater_elem(0.0)
}

#[test]
fn a_plan_serves_as_its_mask_does_and_both_polarities_agree() {
    let device = Device::flex();
    let [q, k, v] = rows(&device);
    let options = AttentionOptions::new();
    let mask = shown([1, 2, 19, 70], &device);
    let attend = |mask| {
        let out = MaskedAttention::new(q.clone(), k.clone(), v.clone())
            .mask(mask)
            .options(options)
            .forward();
        values(out)
    };
    let visible = attend(AttentionMask::visible(mask.clone()));
    let hidden = AttentionMask::hidden(mask.clone().bool_not());
    assert_eq!(visible, attend(hidden.clone()));
    let shown = hidden.clone().into_visible();
    assert_eq!(shown.into_data(), mask.into_data());
    let attention = || MaskedAttention::new(q.clone(), k.clone(), v.clone()).options(options);
    let (_, visible_lse) = attention().mask(hidden.clone()).forward_with_lse();
    let visible_lse = values(visible_lse);
    let plan = TilePlan::new(hidden, [19, 70], true);
    for _ in 0..2 {
        let planned = attention().plan(&plan);
        assert_eq!(values(planned.clone().forward()), visible);
        let (out, lse) = planned.forward_with_lse();
        assert_eq!(values(out), visible);
        assert_eq!(values(lse), visible_lse);
    }
}

/// Masks of both polarities may be wrong together: the output of a query tells them apart.
#[test]
fn a_query_that_is_shown_one_key_has_its_value() {
    let device = Device::flex();
    let [q, k, v] = rows(&device);
    let [batch, q_heads, kv_heads, q_len, k_len, dim] = SIZES;
    let first = Tensor::<1, Int>::arange(0..k_len as i64, &device).equal_elem(0);
    let first = first.reshape([1, 1, 1, k_len]);
    let value = values(v.clone());
    for mask in [
        AttentionMask::visible(first.clone()),
        AttentionMask::hidden(first.bool_not()),
    ] {
        let options = AttentionOptions::new();
        let out = MaskedAttention::new(q.clone(), k.clone(), v.clone())
            .mask(mask)
            .options(options)
            .forward();
        for (row, out) in values(out).chunks(dim).enumerate() {
            let (sequence, head) = (row / q_len / q_heads, row / q_len % q_heads);
            let kv_head = sequence * kv_heads + head / (q_heads / kv_heads);
            assert_eq!(out, &value[kv_head * k_len * dim..][..dim], "row {row}");
        }
        assert_eq!(value.len(), batch * kv_heads * k_len * dim);
    }
}

/// A bias of 16 bits or with strides of 0 is read correctly, and has a gradient of its own shape and type.
#[test]
fn a_bias_may_be_all_that_is_trained() {
    let device = Device::flex().autodiff();
    let [q, k, v] = rows(&device);
    for element in [ElementType::F32, ElementType::Bf16] {
        let bias = random([1, 2, 1, 70], &device).cast(dtype(element));
        let bias = bias.require_grad();
        let expanded = bias.clone().expand([2, 2, 19, 70]);
        let options = AttentionOptions::new();
        let attend = |bias| {
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let attention = MaskedAttention::new(q, k, v).bias(bias);
            attention.options(options).forward_with_lse()
        };
        let (out, lse) = attend(bias.clone());
        let (same, _) = attend(expanded.clone());
        let same_values: Vec<f64> = values(same.clone().inner());
        assert_eq!(values(out.clone().inner()), same_values);
        let grads = (out.sum() + lse.sum()).backward();
        let grad = bias.grad(&grads).unwrap();
        assert_eq!((grad.dims(), grad.dtype()), ([1, 2, 1, 70], dtype(element)));
        assert!(values(grad).iter().any(|&x| x != 0.0));
        assert!(q.grad(&grads).is_none());
    }
}

#[test]
fn whatever_is_tracked_gets_the_same_gradient() {
    let device = Device::flex().autodiff();
    let data: Vec<_> = (rows(&device).into_iter())
        .chain([random([2, 4, 19, 70], &device)])
        .map(|t| t.into_data())
        .collect();
    let mask = shown([2, 1, 1, 70], &device);
    let run = |tracked: [bool; 4]| {
        let tensors = [0, 1, 2, 3].map(|n: usize| {
            let tensor = Tensor::<4>::from_data(data[n].clone(), &device);
            tensor.set_require_grad(tracked[n])
        });
        let [q, k, v, bias] = tensors.clone();
        let mask = AttentionMask::visible(mask.clone());
        let out = MaskedAttention::new(q, k, v)
            .mask(mask)
            .bias(Some(bias))
            .forward();
        let grads = (out.clone() * out).sum().backward();
        tensors.map(|tensor| tensor.grad(&grads).map(values))
    };
    let all = run([true; 4]);
    for which in 0..4 {
        let mut tracked = [false; 4];
        tracked[which] = true;
        let one = run(tracked);
        assert_eq!(one[which], all[which]);
        assert_eq!(one.iter().flatten().count(), 1);
    }
}

#[test]
fn bad_input_is_refused_by_tensor_and_axis() {
    let device = Device::flex();
    let [q, k, v] = rows(&device);
    let attend = |mask: Option<[usize; 4]>, bias: Option<Tensor<4>>, options| {
        let mask = mask.map(|shape| AttentionMask::visible(shown(shape, &device)));
        MaskedAttention::new(q.clone(), k.clone(), v.clone())
            .mask(mask)
            .bias(bias)
            .options(options)
            .try_forward()
    };
    let options = AttentionOptions::new();
    let text = "the mask must have size 1, 4 or 2 on axis 1, but has 3";
    refused_as(attend(Some([2, 3, 19, 70]), None, options), text);
    let short = random([2, 2, 18, 70], &device);
    let text = "the bias must have size 1 or 19 on axis 2, but has 18";
    refused_as(attend(None, Some(short), options), text);
    let wide = random([1, 1, 1, 70], &device).cast(DType::F64);
    let text = "the bias must be f32, f16 or bf16, but is f64";
    refused_as(attend(None, Some(wide), options), text);
    let windowed = options.with_keep_window(3);
    refused(attend(None, None, windowed), "WindowWithoutScores");

    let planned = |lengths: [usize; 2], causal| {
        let mask = AttentionMask::visible(shown([1, 1, lengths[0], lengths[1]], &device));
        let plan = TilePlan::new(mask, lengths, causal);
        let attention = MaskedAttention::new(q.clone(), k.clone(), v.clone()).plan(&plan);
        attention.options(options).try_forward()
    };
    assert!(planned([19, 70], true).is_ok());
    let (plan, options) = (false, true);
    let error = planned([19, 70], plan).unwrap_err();
    assert_eq!(error, AttentionError::PlanCausal { plan, options });
    let error = planned([19, 71], true).unwrap_err();
    assert!(error.to_string().contains("axis 3"));
    let mask = AttentionMask::visible(shown([1, 1, 5, 70], &device));
    let text = "the mask must have size 1 or 19 on axis 2, but has 5";
    refused_as(TilePlan::try_new(mask, [19, 70], true), text);
}

#[test]
#[should_panic(expected = "the mask must have size 1 or 70 on axis 3, but has 69")]
fn the_plain_form_panics_with_the_text_of_the_error() {
    let device = Device::flex();
    let [q, k, v] = rows(&device);
    let mask = AttentionMask::hidden(shown([1, 1, 19, 69], &device));
    let _ = MaskedAttention::new(q, k, v).mask(mask).forward();
}

//! Outputs and selections on Flex against the oracle.

use crate::case::{Case, ELEMENTS, Tensors, bits, cases, close, grad, ints, tensor, values};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::{
    Attention, AttentionOptions, ElementType, dynamic_mask_attention, select, zoh_scores,
};
use flash_dma_reference::{Rng, generate::Scores, generate::normal, zoh::Zoh};

#[test]
fn out_and_lse_match_the_oracle() {
    for case in cases(&ELEMENTS) {
        let tensors = case.tensors(&Device::flex());
        let (out, lse) = tensors.attend_with_lse(case.options);
        case.check_forward(out.clone(), lse);
        let alone = bits(tensors.attend(case.options));
        let what = format!("{}: the lse must not change the output", case.name);
        assert_eq!(bits(out), alone, "{what}");
    }
}

/// `[batch, len, heads, head_dim]` data viewed through a transpose gives the bits of the copy.
#[test]
fn strided_inputs_equal_their_copies() {
    for case in cases(&ELEMENTS) {
        let Tensors { q, k, v, scores } = case.tensors(&Device::flex());
        let through = |t: Tensor<4>| {
            let [b, h, n, d] = t.dims();
            let packed = t.swap_dims(1, 2).reshape([b, n, h * d]);
            packed.reshape([b, n, h, d]).swap_dims(1, 2)
        };
        // A last axis that is not contiguous, which must be copied, and a slice with an offset.
        let columns = |t: Tensor<4>| t.swap_dims(2, 3).mul_scalar(1.0).swap_dims(2, 3);
        let offset = |t: Tensor<4>| {
            let [b, h, n, d] = t.dims();
            Tensor::cat(vec![t.clone(), t], 1).slice([0..b, h..2 * h, 0..n, 0..d])
        };
        let reversed = |t: Tensor<4>| t.flip([2]).mul_scalar(1.0).flip([2]);
        let plain = Tensors { q, k, v, scores };
        let expected = bits(plain.attend(case.options));
        for strided in [&through as &dyn Fn(_) -> _, &columns, &offset, &reversed] {
            let tensors = Tensors {
                q: strided(plain.q.clone()),
                k: strided(plain.k.clone()),
                v: strided(plain.v.clone()),
                scores: plain.scores.clone(),
            };
            let out = bits(tensors.attend(case.options));
            assert_eq!(out, expected, "{}", case.name);
        }
    }
}

#[test]
fn intervals_match_the_oracle_and_serve_several_calls() {
    for kind in Scores::ALL {
        for window in [1, 4, 100] {
            let options = AttentionOptions::new().with_keep_window(window);
            let sizes = [2, 2, 2, 45, 45, 8];
            let case = Case::new(sizes, Some(kind), ElementType::F32, options, 3);
            let Tensors { q, k, v, scores } = case.tensors(&Device::flex());
            let scores = scores.unwrap();
            let intervals = select(scores.clone(), window);
            assert_eq!(intervals.max_live(), window);
            let actual = ints(intervals.tensor().clone());
            assert_eq!(actual, oracle_intervals(&case, window));
            for options in [options, options.with_causal(false)] {
                let (qkv, scores) = ((q.clone(), k.clone(), v.clone()), scores.clone());
                let own = dynamic_mask_attention(qkv.0, qkv.1, qkv.2, scores.clone(), options);
                let scored = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores);
                let scored = scored.options(options);
                let (_, own_lse) = scored.clone().forward_with_lse();
                let shared = scored.intervals(&intervals);
                let (out, lse) = shared.clone().forward_with_lse();
                let same = |own: &[u64], shared: &[u64]| assert!(own == shared, "{}", case.name);
                let own = bits(own);
                same(&own, &bits(shared.forward()));
                same(&own, &bits(out));
                same(&bits(own_lse), &bits(lse));
            }
        }
    }
}

pub fn oracle_intervals(case: &Case, window: usize) -> Vec<i64> {
    let rows = case.inputs.scores.as_ref().unwrap();
    rows.chunks(case.problem().k_len)
        .flat_map(|row| flash_dma_reference::select::intervals(row, window))
        .flat_map(|interval| [i64::from(interval.first), i64::from(interval.end)])
        .collect()
}

#[test]
fn sixteen_bit_scores_are_cast_up() {
    let options = AttentionOptions::new().with_keep_window(6);
    let (sizes, scores) = ([1, 2, 1, 20, 20, 8], Some(Scores::Normal));
    let mut case = Case::new(sizes, scores, ElementType::F32, options, 5);
    let mut rng = Rng::new(8);
    case.inputs.scores = Some(normal(20, 1.0, ElementType::Bf16, &mut rng));
    let tensors = case.tensors(&Device::flex());
    let scores = tensors.scores.clone().unwrap();
    let cast = Tensors {
        scores: Some(scores.cast(burn::tensor::DType::BF16)),
        ..tensors.clone()
    };
    let [cast, plain] = [cast, tensors].map(|tensors| values(tensors.attend(options)));
    assert_eq!(cast, plain);
}

#[test]
fn empty_tensors_have_defined_results() {
    let device = Device::flex();
    for scores in [Some(Scores::Normal), None] {
        let options = AttentionOptions::new();
        let case = Case::new([2, 2, 1, 3, 0, 8], scores, ElementType::F32, options, 1);
        let (out, lse) = case.tensors(&device).attend_with_lse(options);
        assert_eq!(values(out), vec![0.0; 2 * 2 * 3 * 8]);
        assert_eq!(values(lse), vec![f64::NEG_INFINITY; 2 * 2 * 3]);
        for sizes in [[2, 2, 1, 0, 3, 8], [0, 2, 1, 4, 3, 8]] {
            let case = Case::new(sizes, scores, ElementType::Bf16, options, 1);
            let (out, lse) = case.tensors(&device).attend_with_lse(options);
            assert_eq!(out.dims(), case.problem().q_shape());
            assert_eq!(lse.dims(), case.problem().lse_shape());
        }
    }
}

/// Against the oracle in f64, far into both tails of the softplus.
#[test]
fn zoh_scores_match_the_oracle() {
    let device = Device::flex().autodiff();
    let mut rng = Rng::new(11);
    for spread in [1.0, 30.0] {
        let (batch, heads, len, head_dim) = (2, 3, 7, 8);
        let width = heads * head_dim;
        let mut draw = |n, scale| normal(n, scale, ElementType::F32, &mut rng);
        let zoh = Zoh {
            batch,
            heads,
            len,
            head_dim,
            v: draw(batch * heads * len * head_dim, spread),
            dt_proj: draw(heads * width, 0.3),
            a: vec![-1.0, 0.01, -0.25],
        };
        let f32s = ElementType::F32;
        let v = tensor(&zoh.v, [batch, heads, len, head_dim], f32s, &device).require_grad();
        let dt_proj = tensor(&zoh.dt_proj, [heads, width], f32s, &device).require_grad();
        let a = tensor(&zoh.a, [heads], f32s, &device).require_grad();
        let scores = zoh_scores(v.clone(), dt_proj.clone(), a.clone());
        assert_eq!(scores.dims(), [batch, heads, len]);
        close(&values(scores.clone()), &zoh.scores(), 1e-4);

        let slopes = draw(batch * heads * len, 1.0);
        let upstream = tensor(&slopes, [batch, heads, len], f32s, &device);
        let grads = (scores * upstream).sum().backward();
        let exact = zoh.backward(&slopes);
        close(&grad(&v, &grads), &exact.v, 1e-4);
        close(&grad(&dt_proj, &grads), &exact.dt_proj, 1e-4);
        close(&grad(&a, &grads), &exact.a, 1e-4);
    }
}

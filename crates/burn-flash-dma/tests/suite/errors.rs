//! Every refusal: typed from `try_*`, with the same text from the panicking form.

use crate::case::{refused, refused_as};
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::{
    Attention, AttentionError, AttentionOptions, TensorName, dynamic_mask_attention, select,
    try_dynamic_mask_attention, try_select, try_zoh_scores,
};

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, &Device::flex())
}

/// q, k, v and scores of `[2, 4, 5, 8]` queries and `[2, 2, 7, 8]` keys, changed by the test.
fn attend(
    change: impl FnOnce(&mut Tensor<4>, &mut Tensor<4>, &mut Tensor<4>, &mut Tensor<3>),
    options: AttentionOptions,
) -> Result<(), AttentionError> {
    let [mut q, mut k, mut v] = [[2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 8]].map(zeros);
    let mut scores = zeros([2, 2, 7]);
    change(&mut q, &mut k, &mut v, &mut scores);
    let with_lse = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores.clone());
    (with_lse.options(options).try_forward_with_lse())
        .map(drop)
        .inspect_err(|error| {
            let out = try_dynamic_mask_attention(q, k, v, scores, options);
            // By text: a NaN is not equal to itself.
            assert_eq!(out.unwrap_err().to_string(), error.to_string());
        })
}

#[test]
fn wrong_shapes_are_refused() {
    let options = AttentionOptions::new();
    let shape = |tensor, axis, expected, actual| AttentionError::Shape {
        tensor,
        axis,
        expected,
        actual,
    };
    let error = attend(|_, k, _, _| *k = zeros([3, 2, 7, 8]), options).unwrap_err();
    assert_eq!(error, shape(TensorName::Key, 0, 2, 3));
    let error = attend(|_, _, v, _| *v = zeros([2, 2, 6, 8]), options).unwrap_err();
    assert_eq!(error, shape(TensorName::Value, 2, 7, 6));
    let error = attend(|_, _, _, z| *z = zeros([2, 4, 7]), options).unwrap_err();
    assert_eq!(error, shape(TensorName::Scores, 1, 2, 4));
    let error = attend(|q, _, _, _| *q = zeros([2, 3, 5, 8]), options).unwrap_err();
    let (q_heads, kv_heads) = (3, 2);
    assert_eq!(error, AttentionError::HeadRatio { q_heads, kv_heads });
    let error = attend(
        |q, k, v, _| {
            *q = zeros([2, 4, 5, 12]);
            *k = zeros([2, 2, 7, 12]);
            *v = zeros([2, 2, 7, 12]);
        },
        options,
    );
    assert_eq!(error.unwrap_err(), AttentionError::HeadDim { head_dim: 12 });
}

#[test]
fn wrong_element_types_are_refused() {
    let options = AttentionOptions::new();
    let key = attend(|_, k, _, _| *k = k.clone().cast(DType::F16), options);
    let value = attend(|_, _, v, _| *v = v.clone().cast(DType::BF16), options);
    for (tensor, error, actual) in [
        (TensorName::Key, key, "f16"),
        (TensorName::Value, value, "bf16"),
    ] {
        let expected = AttentionError::ElementType {
            tensor,
            expected: "f32".into(),
            actual: actual.into(),
        };
        assert_eq!(error.unwrap_err(), expected);
    }
    let query = attend(|q, _, _, _| *q = q.clone().cast(DType::F64), options);
    refused_as(query, "q must be f32, f16 or bf16, but is f64");
    let error = attend(|_, _, _, z| *z = z.clone().cast(DType::F64), options).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("scores must be f32"), "{text}");
}

#[test]
fn wrong_options_are_refused() {
    let options = AttentionOptions::new();
    for (options, kind) in [
        (options.with_keep_window(0), "ZeroWindow"),
        (options.with_scale(f32::NAN), "Scale"),
        (options.with_softcap(-1.0), "Softcap"),
    ] {
        refused(attend(|_, _, _, _| {}, options), kind);
    }
    let q = zeros([2, 4, 5, 8]);
    let out = Attention::new(q.clone(), q.clone(), q)
        .options(options.with_keep_window(3))
        .try_forward();
    refused(out, "WindowWithoutScores");
    refused(try_select(zeros([2, 2, 7]), 0), "ZeroWindow");
}

#[test]
fn intervals_of_another_problem_are_refused() {
    let options = AttentionOptions::new();
    let attend = |scores: [usize; 3], options| {
        let kv = || zeros([2, 2, 7, 8]);
        Attention::new(zeros([2, 4, 5, 8]), kv(), kv())
            .scores(zeros([2, 2, 7]))
            .intervals(&select(zeros(scores), 3))
            .options(options)
            .try_forward()
    };
    assert!(attend([2, 2, 7], options).is_ok());
    assert!(attend([2, 2, 7], options.with_keep_window(3)).is_ok());
    for window in [2, 4] {
        let error = attend([2, 2, 7], options.with_keep_window(window)).unwrap_err();
        let expected = AttentionError::IntervalsWindow {
            intervals: 3,
            options: window,
        };
        assert_eq!(error, expected);
    }
    let text = "intervals must have size 7 on axis 2, but has 6";
    refused_as(attend([2, 2, 6], options), text);
}

#[test]
fn wrong_parameters_of_the_scores_are_refused() {
    let v = zeros([2, 2, 7, 8]);
    let scores = try_zoh_scores(v.clone(), zeros([2, 8]), zeros([2]));
    refused_as(scores, "dt_proj must have size 16 on axis 1, but has 8");
    let scores = try_zoh_scores(v.clone(), zeros([2, 16]), zeros([4]));
    refused_as(scores, "a must have size 2 on axis 0, but has 4");
    let scores = try_zoh_scores(v, zeros([4, 16]), zeros([2]));
    refused(scores, "Shape");
}

#[test]
#[should_panic(expected = "the 3 query heads are no positive multiple of the 2 key/value heads")]
fn the_plain_form_panics_with_the_text() {
    let kv = zeros([2, 2, 7, 8]);
    let (q, scores) = (zeros([2, 3, 5, 8]), zeros([2, 2, 7]));
    let _ = dynamic_mask_attention(q, kv.clone(), kv, scores, AttentionOptions::new());
}

//! Checks for values that are not finite, on Flex, and on CubeCL's CPU runtime if the build has it.

use crate::case::data;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::finite::{FiniteChecks, FiniteError, Kind, NonFinite, try_check_finite};
use burn_flash_dma::{AttentionOptions, dynamic_mask_attention};

fn on_devices(check: impl Fn(&Device)) {
    check(&Device::flex());
    #[cfg(feature = "cpu")]
    {
        let _alone = crate::case::alone();
        check(&Device::cpu());
    }
}

fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(data(values, shape), device)
}

fn found(result: Result<(), FiniteError>) -> NonFinite {
    match result {
        Err(FiniteError::NonFinite(found)) => found,
        other => panic!("nothing was found: {other:?}"),
    }
}

#[test]
fn the_first_element_is_named_with_its_kind_and_the_count() {
    on_devices(|device| {
        for (first, kind) in [
            (f32::NAN, Kind::Nan),
            (f32::INFINITY, Kind::Infinity),
            (f32::NEG_INFINITY, Kind::NegativeInfinity),
        ] {
            let mut values = vec![0.5; 2 * 3 * 5];
            values[17] = first;
            values[22] = f32::NAN;
            values[29] = f32::INFINITY;
            let all = tensor(values, [2, 3, 5], device);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                if !device.supports_dtype(dtype) {
                    continue;
                }
                let found = found(try_check_finite(&all.clone().cast(dtype), "out", 7));
                assert_eq!((found.tensor.as_str(), found.step), ("out", 7));
                assert_eq!(found.index, [1, 0, 2]);
                assert_eq!(found.row(), [1, 0]);
                assert_eq!(found.kind, kind, "{dtype:?}");
                assert_eq!((found.count, found.elements), (3, 30), "{dtype:?}");
            }
        }
    });
}

#[test]
fn the_first_and_the_last_element_are_checked_and_nothing_else_is_said() {
    on_devices(|device| {
        for at in [0, 19] {
            let check = |values| try_check_finite(&tensor(values, [20], device), "x", 0);
            let mut values = vec![f32::MAX; 20];
            assert_eq!(check(values.clone()), Ok(()));
            values[at] = f32::NAN;
            let found = found(check(values));
            assert_eq!((found.index, found.count), (vec![at], 1));
        }
        let none = Tensor::<3>::zeros([2, 0, 4], device);
        assert_eq!(try_check_finite(&none, "nothing", 0), Ok(()));
    });
}

#[test]
fn a_strided_tensor_is_named_by_its_own_axes() {
    on_devices(|device| {
        let mut values = vec![0.0; 2 * 3 * 4];
        values[2 * 4 + 1] = f32::NAN;
        let rows = tensor(values, [2, 3, 4], device).swap_dims(0, 1);
        assert_eq!(found(try_check_finite(&rows, "rows", 1)).index, [2, 0, 1]);
    });
}

#[test]
fn scores_may_hide_keys_but_nothing_else() {
    on_devices(|device| {
        let scores = |bad: f32| tensor(vec![0.0, f32::NEG_INFINITY, bad, 1.0], [1, 1, 4], device);
        let checks = || FiniteChecks::new(3);
        let check = |bad| checks().hiding("scores", &scores(bad)).try_check();
        assert_eq!(check(2.0), Ok(()));
        for (bad, kind) in [(f32::INFINITY, Kind::Infinity), (f32::NAN, Kind::Nan)] {
            let found = found(check(bad));
            assert_eq!(found.index, [0, 0, 2]);
            assert_eq!((found.kind, found.count), (kind, 1));
        }
    });
}

#[test]
fn of_several_tensors_the_first_bad_one_is_named() {
    let device = Device::flex().autodiff();
    let rows = |heads: usize, bad: Option<usize>| {
        let mut values: Vec<f32> = (0..heads * 48).map(|n| (n as f32 * 0.7).sin()).collect();
        if let Some(at) = bad {
            values[at] = f32::NAN;
        }
        tensor(values, [1, heads, 6, 8], &device).require_grad()
    };
    let check = |bad: Option<usize>| {
        let (q, k, v) = (rows(2, bad), rows(1, None), rows(1, None));
        let scores = tensor((0..6).map(|n| n as f32).collect(), [1, 1, 6], &device);
        let options = AttentionOptions::new().with_keep_window(3);
        let out = dynamic_mask_attention(q.clone(), k.clone(), v.clone(), scores.clone(), options);
        let grads = out.clone().sum().backward();
        FiniteChecks::new(11)
            .tensor("k", &k)
            .hiding("scores", &scores)
            .tensor("out", &out)
            .gradient("the gradient of k", &k, &grads)
            .gradient("nothing's", &scores, &grads)
            .try_check()
    };
    assert_eq!(check(None), Ok(()));
    // A query of head 1 at position 2.
    let error = check(Some((6 + 2) * 8));
    let text = error.clone().unwrap_err().to_string();
    let found = found(error);
    assert_eq!(found.tensor, "out");
    assert_eq!(found.row(), [0, 1, 2]);
    assert_eq!((found.kind, found.count), (Kind::Nan, 8));
    let expected = "out is not finite in step 11: NaN in row [0, 1, 2]";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
#[should_panic(
    expected = "q is not finite in step 5: −∞ in row [0], at [0, 0], the first of 1 of 1 elements"
)]
fn the_plain_form_panics_with_the_text() {
    let bad = tensor(vec![f32::NEG_INFINITY], [1, 1], &Device::flex());
    burn_flash_dma::finite::check_finite(&bad, "q", 5);
}

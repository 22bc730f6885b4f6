//! Autodiff over autodiff: the first derivatives are right, and the second are refused instead of zero.

use burn::backend::autodiff::Autodiff;
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend};
use burn::tensor::{TensorData, read_sync};
use burn_flash_dma::ops::{DynamicMaskOps, Selection, Wanted};
use burn_flash_dma::{AttentionError, AttentionOptions, ElementType, Problem, TensorName};
use burn_flex::Flex;
use std::panic::{AssertUnwindSafe, catch_unwind};

type Once = Autodiff<Flex>;
type Twice = Autodiff<Once>;

const SHAPE: [usize; 4] = [1, 1, 3, 8];

fn problem() -> Problem {
    let options = AttentionOptions::new();
    Problem::new(&SHAPE, &SHAPE, &SHAPE, None, ElementType::F32, &options).unwrap()
}

fn rows<B: Backend>(seed: f32) -> FloatTensor<B> {
    let values: Vec<f32> = (0..24).map(|n| (seed + n as f32).sin()).collect();
    B::float_from_data(TensorData::new(values, SHAPE), &Default::default())
}

fn tracked<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_set_require_grad(tensor, true)
}

fn read<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    read_sync(B::float_into_data(tensor)).unwrap()
}

/// Gradient of q of the sum of the squares of the output.
fn gradient<B: AutodiffBackend + DynamicMaskOps>(
    q: FloatTensor<B>,
) -> FloatTensor<B::InnerBackend> {
    let q = tracked::<B>(q);
    let (k, v) = (rows::<B>(1.0), rows::<B>(2.0));
    let wanted = Wanted::Out;
    let results = B::dynamic_mask_forward(q.clone(), k, v, Selection::All, problem(), wanted);
    let out = results.out;
    let loss = B::float_sum(B::float_mul(out.clone(), out));
    B::grad(&q, &B::backward(loss)).expect("q is tracked")
}

#[test]
fn first_derivatives_over_two_layers_of_autodiff_are_those_over_one() {
    let once = gradient::<Once>(rows::<Once>(0.0));
    let twice = gradient::<Twice>(rows::<Twice>(0.0));
    assert_eq!(read::<Flex>(once), read::<Flex>(twice.into_primitive()));
}

#[test]
fn second_derivatives_are_refused_with_the_text_of_the_error() {
    let q = tracked::<Once>(rows::<Once>(0.0));
    let call = || gradient::<Twice>(Twice::from_inner(q));
    let panic = catch_unwind(AssertUnwindSafe(call)).map(drop).unwrap_err();
    let tensor = TensorName::Query;
    let error = AttentionError::SecondOrder { tensor }.to_string();
    assert_eq!(panic.downcast_ref::<String>(), Some(&error));
}

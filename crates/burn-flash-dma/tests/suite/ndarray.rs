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

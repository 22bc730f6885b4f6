//! Burn's tensors of numbers on the host.

use crate::{Grads, Outputs};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use flash_dma_problem::{ElementType, Problem};

/// Burn's name of an element type.
#[must_use]
pub fn dtype(element: ElementType) -> DType {
    match element {
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
    }
}

/// A tensor of an element type.
pub fn load<const R: usize>(
    values: &[f64],
    shape: [usize; R],
    element: ElementType,
    device: &Device,
) -> Tensor<R> {
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, dtype(element)))
}

/// A tensor of f32.
pub fn floats<const R: usize>(values: &[f64], shape: [usize; R], device: &Device) -> Tensor<R> {
    load(values, shape, ElementType::F32, device)
}

/// q, k and v of a problem.
pub fn rows(p: &Problem, [q, k, v]: [&[f64]; 3], device: &Device) -> [Tensor<4>; 3] {
    let keys = |values| load(values, p.kv_shape(), p.element, device);
    [load(q, p.q_shape(), p.element, device), keys(k), keys(v)]
}

/// The elements of a tensor.
pub fn values<const R: usize>(tensor: Tensor<R>) -> Vec<f64> {
    let values = tensor.into_data_as::<f32>();
    values.iter::<f32>().map(f64::from).collect()
}

/// The gradient of a tracked tensor.
pub fn grad<const R: usize>(x: &Tensor<R>, grads: &Gradients) -> Vec<f64> {
    values(x.grad(grads).expect("a tracked tensor"))
}

/// The results of a forward pass.
pub fn outputs((out, lse): (Tensor<4>, Tensor<3>)) -> Outputs {
    Outputs {
        out: values(out),
        lse: values(lse),
    }
}

/// A loss with these gradients of `out` and of the LSE; an LSE of −∞ has none.
pub fn loss((out, lse): &(Tensor<4>, Tensor<3>), grads: &Grads) -> Tensor<1> {
    let device = out.device();
    let of_out = out.clone().cast(DType::F32) * floats(&grads.out, out.dims(), &device);
    let of_lse = grads.lse.as_ref().map(|grad| {
        let empty = lse.clone().equal_elem(f32::NEG_INFINITY);
        let shown = lse.clone().mask_fill(empty, 0.0);
        (shown * floats(grad, lse.dims(), &device)).sum()
    });
    of_lse
        .into_iter()
        .fold(of_out.sum(), |loss, of_lse| loss + of_lse)
}

//! Tensors as the engine takes and returns them.

use burn::backend::Element as BurnElement;
use burn::tensor::{Bytes, Shape};
use burn_flex::{FlexTensor, Layout};
use flash_dma_cpu::View;
use flash_dma_problem::AttentionError;

/// An element type of Flex tensors.
pub(crate) trait Stored: BurnElement + bytemuck::Pod + Default {}
impl<T: BurnElement + bytemuck::Pod + Default> Stored for T {}

/// Evaluates an expression with the (validated) element type bound to a name.
macro_rules! by_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F32 => {
                type $element = f32;
                $body
            }
            burn::tensor::DType::F16 => {
                type $element = burn::tensor::f16;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $element = burn::tensor::bf16;
                $body
            }
            other => panic!("elements must be f32, f16 or bf16, but are {other:?}"),
        }
    };
}
pub(crate) use by_element;

/// Unwraps the result of a call that the functions on `Tensor` have validated.
pub(crate) fn run(result: Result<(), AttentionError>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// A tensor with non-negative strides and a contiguous last axis.
pub(crate) fn addressable(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let last_is_contiguous = match (layout.shape().last(), layout.strides().last()) {
        (Some(&size), Some(&stride)) => size <= 1 || stride == 1,
        _ => true,
    };
    if last_is_contiguous && layout.strides().iter().all(|&s| s >= 0) {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

pub(crate) fn view<E: Stored, const R: usize>(tensor: &FlexTensor) -> View<'_, E, R> {
    let layout = tensor.layout();
    let strides: Vec<usize> = layout.strides().iter().map(|&s| s as usize).collect();
    View {
        data: &tensor.storage::<E>()[layout.start_offset()..],
        shape: layout.shape().dims(),
        strides: strides
            .try_into()
            .expect("a tensor has a stride for each axis"),
    }
}

pub(crate) fn contiguous<E: Stored>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("the tensor was made contiguous")
}

pub(crate) fn buffer<E: Stored, const R: usize>(shape: [usize; R]) -> Vec<E> {
    vec![E::default(); shape.iter().product()]
}

pub(crate) fn tensor<E: Stored>(values: Vec<E>, shape: impl Into<Shape>) -> FlexTensor {
    let layout = Layout::contiguous(shape.into());
    FlexTensor::new(Bytes::from_elems(values), layout, E::dtype())
}

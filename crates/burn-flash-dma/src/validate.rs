//! Checks that need Burn's types; [`Problem`](crate::Problem) checks shapes and options.

use crate::engines::check_backend;
use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::{AttentionError, ElementType, TensorName, TensorSpec};

pub(crate) fn element_type<const D: usize>(
    name: TensorName,
    tensor: &Tensor<D>,
) -> Result<ElementType, AttentionError> {
    supported_element(name, tensor.dtype())
}

pub(crate) fn supported_element(
    name: TensorName,
    dtype: DType,
) -> Result<ElementType, AttentionError> {
    element_of(dtype).ok_or_else(|| AttentionError::ElementType {
        tensor: name,
        expected: "f32, f16 or bf16".into(),
        actual: dtype.name().into(),
    })
}

/// Element type of an operand below `Tensor`, whose functions have checked it.
#[cfg(any(feature = "autodiff", feature = "cube"))]
pub(crate) fn checked_element(dtype: DType) -> ElementType {
    element_of(dtype).expect("f32, f16 or bf16")
}

/// Element type of a Burn type, if it is supported.
pub(crate) fn element_of(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::F32 => Some(ElementType::F32),
        DType::F16 => Some(ElementType::F16),
        DType::BF16 => Some(ElementType::Bf16),
        _ => None,
    }
}

pub(crate) fn rows_element(rows: &[Tensor<4>; 3]) -> Result<ElementType, AttentionError> {
    let names = [TensorName::Query, TensorName::Key, TensorName::Value];
    let element = element_type(names[0], &rows[0])?;
    for (name, tensor) in names.into_iter().zip(rows) {
        check_element(name, tensor, element)?;
    }
    Ok(element)
}

pub(crate) fn at_most(what: &'static str, size: usize, limit: usize) -> Result<(), AttentionError> {
    match size <= limit {
        true => Ok(()),
        false => Err(AttentionError::TooLarge { what, size, limit }),
    }
}

/// Refuses more keys than positions can count.
pub(crate) fn check_len(len: usize) -> Result<(), AttentionError> {
    at_most("the number of keys", len, i32::MAX as usize)
}

pub(crate) fn is_tracked<const D: usize>(tensor: &Tensor<D>) -> bool {
    #[cfg(feature = "autodiff")]
    return tensor.is_tracked();
    #[cfg(not(feature = "autodiff"))]
    {
        let _ = tensor;
        false
    }
}

pub(crate) fn tracked(rows: &[Tensor<4>; 3]) -> bool {
    rows.iter().any(is_tracked)
}

/// Common device of q, k and v; refused if it does not support their element type.
pub(crate) fn supported(
    rows: &[Tensor<4>; 3],
    element: ElementType,
) -> Result<Device, AttentionError> {
    let device = rows[0].device();
    same_device(&device, TensorName::Key, rows[1].device())?;
    same_device(&device, TensorName::Value, rows[2].device())?;
    computes_in(&device, rows[0].dtype(), element)?;
    Ok(device)
}

/// Refuses a device without an engine, or one that does not support an element type.
pub(crate) fn computes_in(
    device: &Device,
    dtype: DType,
    element: ElementType,
) -> Result<(), AttentionError> {
    check_backend(device)?;
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    let what = format!("arithmetic in {element}");
    Err(AttentionError::Unsupported { what })
}

/// Casts a tensor of a supported type up to f32: exact, and differentiable. The backward pass keeps the input.
pub(crate) fn as_f32<const D: usize>(
    name: TensorName,
    tensor: Tensor<D>,
) -> Result<Tensor<D>, AttentionError> {
    Ok(match element_type(name, &tensor)? {
        ElementType::F32 => tensor,
        ElementType::F16 | ElementType::Bf16 => {
            Tensor::from_dispatch(Dispatch::training_widen(tensor.into_dispatch()))
        }
    })
}

pub(crate) fn check_element<const D: usize>(
    name: TensorName,
    tensor: &Tensor<D>,
    expected: ElementType,
) -> Result<(), AttentionError> {
    match element_type(name, tensor)? {
        actual if actual == expected => Ok(()),
        actual => Err(AttentionError::element_type(name, expected, actual)),
    }
}

/// Casts 16-bit scores up to f32, which keeps their order and their gradient; refuses f64, as rounding could make two
/// keys tie.
pub(crate) fn scores_as_f32(scores: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
    as_f32(TensorName::Scores, scores)
}

pub(crate) fn check_shape(
    name: TensorName,
    shape: &[usize],
    expected: &[usize],
) -> Result<(), AttentionError> {
    let spec = TensorSpec {
        name,
        shape,
        // The engine checks the strides.
        strides: &vec![1; shape.len()],
    };
    spec.check(expected)
}

/// Refuses a tensor on another device; tracked and untracked tensors of one device may be mixed.
pub(crate) fn same_device(
    expected: &Device,
    name: TensorName,
    actual: Device,
) -> Result<(), AttentionError> {
    if actual.without_autodiff() == expected.clone().without_autodiff() {
        Ok(())
    } else {
        Err(AttentionError::Device { tensor: name })
    }
}

#[track_caller]
pub(crate) fn expect<T>(result: Result<T, impl std::fmt::Display>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

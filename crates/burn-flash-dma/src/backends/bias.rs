//! Biases of 16 bits, for engines that read f32.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Slice};

/// A bias as f32. Axes that it `repeats`, by a stride of 0, are cast once and repeated again: Burn's own cast would
/// write out the repetitions.
pub(crate) fn as_f32<B: Backend>(
    bias: FloatTensor<B>,
    repeats: impl Fn(usize) -> bool,
) -> FloatTensor<B> {
    if bias.dtype() == DType::F32 {
        return bias;
    }
    let shape = bias.shape();
    let once: Vec<Slice> = (0..shape.num_dims())
        .map(|axis| match shape[axis] > 1 && repeats(axis) {
            true => (0..1).into(),
            false => Slice::full(),
        })
        .collect();
    let bias = B::float_cast(B::float_slice(bias, &once), FloatDType::F32);
    B::float_expand(bias, shape)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::as_f32;
    use burn::backend::Flex;
    use burn::tensor::{DType, Device, Tensor};

    #[test]
    fn what_a_bias_repeats_is_not_written_out() {
        let device = Device::flex();
        let values: Vec<f32> = (0..6).map(|n| n as f32).collect();
        let bias = Tensor::<1>::from_data(&values[..], &device).reshape([1, 2, 1, 3]);
        let bias = bias.cast(DType::BF16).expand([5, 2, 1000, 3]);
        let expected = bias.clone().cast(DType::F32).into_data();
        let bias = bias.try_into_primitive::<Flex>().unwrap();
        let strides = bias.layout().strides().to_vec();
        assert_eq!((strides[0], strides[2]), (0, 0));
        let wide = as_f32::<Flex>(bias, |axis| strides[axis] == 0);
        assert_eq!(wide.layout().strides(), [0, 3, 0, 1]);
        assert_eq!(wide.storage::<f32>().len(), 6);
        let wide = Tensor::<4>::from_primitive::<Flex>(wide);
        assert_eq!(wide.into_data(), expected);
    }
}

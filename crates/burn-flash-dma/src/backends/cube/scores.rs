//! Scores of a few tokens on every CubeCL runtime, in one launch.

use super::product::rounded;
use super::tensors::{addressable, empty, run};
use crate::ops::scores::ScoreOps;
use crate::types::OptionalFloat;
use crate::validate::checked_element;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use flash_dma_kernels::{ZohParameters, zoh_scores};

impl ScoreOps for CubeBackend {
    fn zoh_scores_of_few(
        values: FloatTensor<Self>,
        dt_proj: FloatTensor<Self>,
        bias: OptionalFloat<Self>,
        a: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let client = values.client.clone();
        let [batch, heads, len, _] = values.meta.shape().dims();
        let out = empty(&values, [batch, heads, len], DType::F32);
        let bias = bias.into_option();
        let dtype = common_type(dt_proj.dtype, [Some(&a), bias.as_ref()]);
        let parameter = |tensor| into_contiguous(rounded(tensor, dtype)).binding();
        let parameters = ZohParameters {
            dt_proj: parameter(dt_proj),
            bias: bias.map(parameter),
            a: parameter(a),
            element: checked_element(dtype),
        };
        let element = checked_element(values.dtype);
        let values = addressable(values);
        let to = out.clone().binding();
        run(zoh_scores(&client, &values, element, &parameters, &to));
        out
    }
}

/// The common type of all parameters, or f32 if they differ.
fn common_type(dtype: DType, others: [Option<&CubeTensor>; 2]) -> DType {
    let same = (others.into_iter().flatten()).all(|tensor| tensor.dtype == dtype);
    if same { dtype } else { DType::F32 }
}

//! The tensors of a product.

use crate::host::check::{Layout, SEGMENT_BYTES, begins_at, check_tensor};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, ElementType, TensorName};

/// The operands of `A B`.
#[derive(Clone, Debug)]
pub struct Operands {
    /// `[m, k]`; one of its axes is contiguous.
    pub a: TensorBinding,
    /// `[k, n]`; one of its axes is contiguous.
    pub b: TensorBinding,
    /// The element type of both.
    pub element: ElementType,
}

/// The destination of a product, contiguous: `[m, n]`, or in parts `[parts, m, n]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<'a> {
    pub tensor: &'a TensorBinding,
    pub element: ElementType,
}

impl<'a> Output<'a> {
    pub(crate) fn new(tensor: &'a TensorBinding, element: ElementType) -> Self {
        Self { tensor, element }
    }
}

/// The sizes of `A B`: A is `[m, k]`, B `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Rows of A.
    pub m: usize,
    /// Columns of B.
    pub n: usize,
    /// Columns of A and rows of B, which the sums run over.
    pub k: usize,
}

/// The axis along which the elements of a matrix are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Major {
    Row,
    Column,
}

impl Operands {
    /// The sizes of the product.
    ///
    /// # Panics
    ///
    /// If an operand has fewer than two axes; [`product`](super::product) checks that first.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        Sizes {
            m: self.a.shape[0],
            n: self.b.shape[1],
            k: self.a.shape[1],
        }
    }

    /// Checks both operands and the result `[m, n]`.
    pub(crate) fn check(&self, out: Output) -> Result<(), AttentionError> {
        let factors = [
            (TensorName::LeftFactor, &self.a),
            (TensorName::RightFactor, &self.b),
        ];
        for (tensor, factor) in factors {
            let (expected, actual) = (2, factor.shape.len());
            if actual != expected {
                return Err(AttentionError::Rank {
                    tensor,
                    expected,
                    actual,
                });
            }
        }
        let Sizes { m, n, k } = self.sizes();
        let (size, strided) = (self.element.size(), Layout::Strided);
        for ((tensor, factor), shape) in factors.into_iter().zip([[m, k], [k, n]]) {
            match major(factor) {
                Some(Major::Row) => check_tensor(tensor, factor, &shape, size, strided)?,
                Some(Major::Column) => {
                    // The axes change places for the check alone, so sizes are compared first.
                    let (turned, shape) = (transposed(factor), [shape[1], shape[0]]);
                    check_tensor(tensor, &turned, &shape, size, strided)?;
                }
                None => {
                    let strides = factor.strides.to_vec();
                    return Err(AttentionError::Strides { tensor, strides });
                }
            }
        }
        let (size, contiguous) = (out.element.size(), Layout::Contiguous);
        check_tensor(TensorName::Product, out.tensor, &[m, n], size, contiguous)
    }

    /// The same operands, but axes of one element, whose strides are never used, get the strides of a matrix.
    pub(crate) fn canonical(&self) -> Self {
        let canonical = |tensor: &TensorBinding| {
            let mut tensor = tensor.clone();
            if tensor.shape[1] <= 1 {
                tensor.strides[1] = 1;
            }
            if tensor.shape[0] <= 1 {
                let row = tensor.strides[1] == 1;
                tensor.strides[0] = if row { tensor.shape[1] } else { 1 };
            }
            tensor
        };
        Self {
            a: canonical(&self.a),
            b: canonical(&self.b),
            element: self.element,
        }
    }

    /// True if the TMA can copy both operands: every row (or column) begins at a multiple of 16 bytes.
    pub(crate) fn takes_boxes(&self) -> bool {
        [&self.a, &self.b].iter().all(|tensor| {
            let pitch = match major(tensor) {
                Some(Major::Row) => tensor.strides[0],
                Some(Major::Column) => tensor.strides[1],
                None => return false,
            } * self.element.size();
            begins_at(tensor, SEGMENT_BYTES)
                && pitch.is_multiple_of(SEGMENT_BYTES)
                && (1..1 << 40).contains(&pitch)
        })
    }
}

/// The contiguous axis of a matrix, rows if both are.
pub(crate) fn major(tensor: &TensorBinding) -> Option<Major> {
    let contiguous = |axis: usize| tensor.strides[axis] == 1 || tensor.shape[axis] <= 1;
    match [contiguous(0), contiguous(1)] {
        [_, true] => Some(Major::Row),
        [true, _] => Some(Major::Column),
        _ => None,
    }
}

/// A matrix with its axes in the other order.
pub(crate) fn transposed(tensor: &TensorBinding) -> TensorBinding {
    let mut tensor = tensor.clone();
    tensor.shape.swap(0, 1);
    tensor.strides.swap(0, 1);
    tensor
}

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
    /// The rows are contiguous.
    Row,
    /// The columns are contiguous.
    Column,
}

impl Operands {
    /// The sizes.
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
    pub(crate) fn check(
        &self,
        out: &TensorBinding,
        out_element: ElementType,
    ) -> Result<(), AttentionError> {
        let named = [TensorName::LeftFactor, TensorName::RightFactor]
            .into_iter()
            .zip([&self.a, &self.b]);
        for (name, tensor) in named.clone() {
            if tensor.shape.len() != 2 {
                return Err(AttentionError::Rank {
                    tensor: name,
                    expected: 2,
                    actual: tensor.shape.len(),
                });
            }
        }
        let Sizes { m, n, k } = self.sizes();
        let (size, strided) = (self.element.size(), Layout::Strided);
        for ((name, tensor), [rows, columns]) in named.zip([[m, k], [k, n]]) {
            match major(tensor) {
                Some(Major::Row) => check_tensor(name, tensor, &[rows, columns], size, strided)?,
                Some(Major::Column) => {
                    // The axes change places for the check alone, so sizes are compared first.
                    let turned = transposed(tensor);
                    check_tensor(name, &turned, &[columns, rows], size, strided)?;
                }
                None => {
                    return Err(AttentionError::Strides {
                        tensor: name,
                        strides: tensor.strides.to_vec(),
                    });
                }
            }
        }
        let (size, contiguous) = (out_element.size(), Layout::Contiguous);
        check_tensor(TensorName::Product, out, &[m, n], size, contiguous)
    }

    /// The same operands with strides as of a matrix for axes of one element, whose strides are never used.
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

    /// Whether the tensor memory accelerator can copy both operands: every row (or column) begins at a multiple of 16
    /// bytes.
    pub(crate) fn takes_boxes(&self) -> bool {
        [&self.a, &self.b].iter().all(|tensor| {
            let Some(major) = major(tensor) else {
                return false;
            };
            let pitch = match major {
                Major::Row => tensor.strides[0],
                Major::Column => tensor.strides[1],
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

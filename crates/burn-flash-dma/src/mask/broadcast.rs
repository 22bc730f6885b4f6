//! Shapes that broadcast.

use burn::tensor::{Tensor, kind::Basic};

/// The shape that two shapes broadcast to.
///
/// # Panics
///
/// If there is no such shape; `what` names the tensors in the message.
pub(super) fn broadcast_shape<const D: usize>(
    a: [usize; D],
    b: [usize; D],
    what: &str,
) -> [usize; D] {
    std::array::from_fn(|axis| match (a[axis], b[axis]) {
        (1, n) | (n, 1) => n,
        (n, m) => {
            assert_eq!(
                n, m,
                "{what} of shapes {a:?} and {b:?} do not broadcast on axis {axis}"
            );
            n
        }
    })
}

/// The tensor in a shape that it broadcasts to. Burn expands to no axis of size 0.
pub(super) fn expand<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    shape: [usize; D],
) -> Tensor<D, K> {
    if shape.contains(&0) {
        Tensor::empty(shape, (&tensor.device(), tensor.dtype()))
    } else {
        tensor.expand(shape)
    }
}

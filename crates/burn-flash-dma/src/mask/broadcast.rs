//! Shapes that broadcast.

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

//! A borrowed strided tensor.

/// A borrowed tensor of `R` axes: element `index` is `data[sum(index * strides)]`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, E, const R: usize> {
    /// The buffer; the element of index zero comes first.
    pub data: &'a [E],
    /// Size of each axis.
    pub shape: [usize; R],
    /// Elements from one index to the next, for each axis; the last must be 1.
    pub strides: [usize; R],
}

impl<'a, E, const R: usize> View<'a, E, R> {
    /// A view of a contiguous buffer.
    pub fn contiguous(data: &'a [E], shape: [usize; R]) -> Self {
        let mut strides = [1; R];
        for axis in (1..R).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self {
            data,
            shape,
            strides,
        }
    }
}

//! Borrowed strided tensors.

use flash_dma_problem::contiguous_strides;

/// A borrowed tensor of `R` axes: element `index` is `data[sum(index * strides)]`.
///
/// The last axis must be contiguous; the others may have any stride, so a `[batch, len, heads, dim]`
/// buffer is read through a transpose without a copy, and a stride of 0 broadcasts an axis.
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
        let mut strides = contiguous_strides(&shape);
        Self {
            data,
            shape,
            strides: core::array::from_fn(|_| strides.next().expect("one stride per axis")),
        }
    }
}

impl<'a, E> View<'a, E, 4> {
    /// The elements `[batch, head, index, ..]`.
    #[inline]
    pub(crate) fn row(&self, batch: usize, head: usize, index: usize) -> &'a [E] {
        let start = batch * self.strides[0] + head * self.strides[1] + index * self.strides[2];
        &self.data[start..start + self.shape[3]]
    }
}

impl<'a, E> View<'a, E, 3> {
    /// The elements `[batch, head, ..]`.
    pub(crate) fn row(&self, batch: usize, head: usize) -> &'a [E] {
        let start = batch * self.strides[0] + head * self.strides[1];
        &self.data[start..start + self.shape[2]]
    }
}

/// A borrowed tensor that broadcasts: element `index` is `data[sum(index * strides)]`; strides may be anything, even 0.
#[derive(Clone, Copy, Debug)]
pub struct BroadcastView<'a, T> {
    /// The buffer; the element of index zero comes first.
    pub data: &'a [T],
    /// Size of each axis.
    pub shape: [usize; 4],
    /// Elements from one index to the next, for each axis.
    pub strides: [usize; 4],
}

impl<'a, T> BroadcastView<'a, T> {
    /// A view of a contiguous buffer.
    pub fn contiguous(data: &'a [T], shape: [usize; 4]) -> Self {
        let View { strides, .. } = View::contiguous(data, shape);
        Self {
            data,
            shape,
            strides,
        }
    }

    /// The strides in the tensor's broadcast shape: 0 on an axis of size 1.
    pub(crate) fn steps(&self) -> [usize; 4] {
        core::array::from_fn(|axis| match self.shape[axis] {
            1 => 0,
            _ => self.strides[axis],
        })
    }
}

//! Passes over elements in the order of memory: a unit owns a vector of neighbours.

use crate::host::check::{address_type, begins_at, widest_vector};
use crate::host::scratch::one_unit_each;
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::{CubeCount, TensorBinding};
use flash_dma_problem::ElementType;

/// A pass over contiguous tensors of one number of elements.
pub(crate) struct Pass {
    pub address: AddressType,
    /// Elements of a vector.
    pub vector: usize,
    /// Vectors of a tensor.
    pub items: usize,
}

impl Pass {
    /// The pass; none over tensors without elements.
    pub(crate) fn new(
        client: &Client,
        element: ElementType,
        tensors: &[&TensorBinding],
    ) -> Option<Self> {
        let (vector, items) = vectors(client, element, tensors);
        (items > 0).then(|| Self {
            address: address_type(tensors, element.size()),
            vector,
            items,
        })
    }

    /// A unit for each vector; units past the last must return.
    pub(crate) fn cubes(&self, client: &Client) -> (CubeCount, CubeDim) {
        one_unit_each(client, self.items)
    }
}

/// The widest vectors that all tensors, of as many elements as the first, can be read in, and their number.
pub(crate) fn vectors(
    client: &Client,
    element: ElementType,
    tensors: &[&TensorBinding],
) -> (usize, usize) {
    let size = element.size();
    let count: usize = tensors[0].shape.iter().product();
    let vector = widest_vector(client, size, |n| {
        count.is_multiple_of(n) && tensors.iter().all(|tensor| begins_at(tensor, n * size))
    });
    (vector, count / vector)
}

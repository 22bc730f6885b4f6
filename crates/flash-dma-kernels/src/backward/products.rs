//! The two products of the backward pass.

use cubecl::prelude::*;

/// The products of a tile of queries and a tile of keys, the one or the other the rows.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Products<N: Size> {
    /// `S = Q K^T`.
    pub s: Vector<f32, N>,
    /// `dP = dO V^T`; on `wgmma` it may be in flight.
    pub dp: Vector<f32, N>,
}

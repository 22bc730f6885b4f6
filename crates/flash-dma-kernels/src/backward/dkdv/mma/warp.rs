//! A warp's step and its sums, in either role.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::queries::Step;
use cubecl::prelude::*;

#[derive(CubeType)]
pub(crate) struct WarpSums<NS: Size, NO: Size> {
    /// The products with the query tile in use, shaped as [`DkdvBlueprint::products`].
    pub products: Array<Vector<f32, NS>>,
    /// dV in the first role, dK without its scale in the second, shaped as [`DkdvBlueprint::sums`].
    pub gradients: Array<Vector<f32, NO>>,
    /// The gradients of the scores of the two rows of every fragment; second role only.
    pub scores: Array<f32>,
}

#[cube]
impl<NS: Size, NO: Size> WarpSums<NS, NO> {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> WarpSums<NS, NO> {
        let mut gradients = Array::<Vector<f32, NO>>::new(comptime!(bp.head_dim / 32));
        #[unroll]
        for c in 0..comptime!(bp.head_dim / 32) {
            gradients[c] = Vector::new(0.0f32);
        }
        let mut scores = Array::<f32>::new(comptime!(bp.fragments * 2));
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            scores[n] = 0.0f32;
        }
        let products =
            Array::<Vector<f32, NS>>::new(comptime!(bp.rows / 16 / bp.products().blocks));
        WarpSums::<NS, NO> {
            products,
            gradients,
            scores,
        }
    }
}

#[derive(CubeType)]
pub(crate) struct WarpStep {
    pub turn: usize,
    pub at: Step,
    /// Which pairs of a boundary step are seen, for each fragment in the format of [`SeenWords::pack`](crate::backward::dkdv::shared::mask::SeenWords::pack); first role
    /// only, because its weights tell the second, and only if `bp.pattern.is_planned()`.
    pub seen: Array<u32>,
}

#[cube]
impl WarpStep {
    /// A step of the second role, which has no `seen`.
    pub(crate) fn of_second_role(turn: usize, at: Step, #[comptime] bp: DkdvBlueprint) -> WarpStep {
        let seen = Array::<u32>::new(comptime!(bp.fragments));
        WarpStep { turn, at, seen }
    }
}

//! Logits in the log2 domain, and which of them a query sees.

use super::blueprint::MmaBlueprint;
use super::rows::TileRow;
use super::stream::Stages;
use crate::tile::mma::ex2;
use cubecl::prelude::*;

/// Factors of a logit, times log2(e) where it is a factor of the result: `exp` becomes one `2^x`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LogitScale {
    /// On the product: `scale * log2(e)`; with a softcap `c`, `scale / c`.
    pub inner: f32,
    /// With a softcap `c`: `c * log2(e)`.
    pub outer: f32,
}

#[cube]
impl LogitScale {
    pub(super) fn new(scale: f32, softcap: f32, #[comptime] bp: MmaBlueprint) -> LogitScale {
        let log2e = comptime!(core::f32::consts::LOG2_E);
        let mut inner = scale * log2e;
        let mut outer = 1.0f32;
        if comptime!(bp.softcap) {
            inner = scale / softcap;
            outer = softcap * log2e;
        }
        LogitScale { inner, outer }
    }

    /// The logit of a product, without its score.
    pub(super) fn apply(&self, product: f32, #[comptime] bp: MmaBlueprint) -> f32 {
        let mut x = product * self.inner;
        if comptime!(bp.softcap) {
            x = self.outer * tanh(x);
        }
        x
    }
}

/// `tanh(x) = 1 - 2 / (1 + e^(2x))` by the special-function unit; its absolute error is a few 1e-7.
/// The `tanh.approx` instruction's, 5e-4, would show in the logits.
#[cube]
fn tanh(x: f32) -> f32 {
    1.0f32 - 2.0f32 / (1.0f32 + ex2(x * comptime!(2.0 * core::f32::consts::LOG2_E)))
}

/// Whether the query of `row` attends to slot `col` of key tile `tile`.
#[cube]
pub(super) fn sees<E: Float>(
    row: &TileRow,
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    k_len: usize,
    #[comptime] bp: MmaBlueprint,
) -> bool {
    // Key `n` is visible from position `n` on: to all positions if there is no causal mask.
    let mut first = (tile * comptime!(bp.key_tile) + col) as i32;
    let mut end = k_len as i32;
    if comptime!(bp.sparse) {
        let stage = tile % comptime!(bp.stages);
        let interval = stages.intervals[stage * comptime!(bp.key_tile) + col];
        first = interval.extract(0usize) as i32;
        end = interval.extract(1usize) as i32;
    }
    first <= row.position && row.position < end
}

/// log2(e) times the score of slot `col` of key tile `tile`.
#[cube]
pub(super) fn score<E: Float>(
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    #[comptime] bp: MmaBlueprint,
) -> f32 {
    let stage = tile % comptime!(bp.stages);
    stages.scores[stage * comptime!(bp.key_tile) + col] * comptime!(core::f32::consts::LOG2_E)
}

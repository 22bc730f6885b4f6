//! The keys of a query tile, as the steps over key tiles need them.

use crate::args::Scaling;
use crate::dropout::{DropoutArg, copied};
use crate::matrix::args::{KeySource, Operands};
use crate::matrix::logit_scale::LogitScale;
use crate::matrix::mask::{MaskRows, step_of};
use crate::matrix::pair_bias::PairBias;
use crate::matrix::query_tile::score_row;
use crate::matrix::rows::CubeTile;
use crate::matrix::stages::RowAddress;
use crate::matrix::tile_keys::TileKeys;
use crate::pattern::layout::KEY_BLOCK;
use cubecl::prelude::*;

/// The keys that a cube's query tile attends to: the locations of their rows, scores and intervals in global memory,
/// and the factors that turn products with them into logits.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct AttendedKeys {
    pub own: CubeTile,
    pub keys: TileKeys,
    /// The rows of K and V, from key `keys.begin` on.
    pub k_rows: RowAddress,
    pub v_rows: RowAddress,
    /// The bits of the rows, and the location of their biases.
    pub mask: MaskRows,
    /// Offset of the first key in the scores.
    pub score_row: usize,
    pub bias: PairBias,
    pub scale: LogitScale,
    pub dropout: DropoutArg,
}

#[cube]
impl AttendedKeys {
    pub(crate) fn new<E: Float, NQ: Size>(
        operands: &Operands<E, NQ>,
        source: &KeySource,
        scaling: &Scaling,
        own: CubeTile,
        keys: TileKeys,
    ) -> AttendedKeys {
        let (batch, head) = (own.batch, own.kv_head);
        let k_rows = RowAddress::of::<E>(&operands.k, batch, head).starting_at(keys.begin);
        let v_rows = RowAddress::of::<E>(&operands.v, batch, head).starting_at(keys.begin);
        let mask = MaskRows::new(source, &own, &keys);
        let score_row = score_row(source, &own);
        let bias = PairBias::new(source, &own);
        let scale = LogitScale::new(scaling, comptime!(own.bp.logit_form()));
        AttendedKeys {
            own,
            keys,
            k_rows,
            v_rows,
            mask,
            score_row,
            bias,
            scale,
            dropout: copied(&scaling.dropout),
        }
    }

    pub(crate) fn interval_row(&self) -> usize {
        self.own.kv_row * self.own.k_len
    }

    /// The key of the first column of tile `tile`; not for lists of single keys.
    pub(crate) fn first_key(&self, source: &KeySource, tile: usize) -> usize {
        let bp = comptime!(self.own.bp);
        let mut first = self.keys.begin + tile * comptime!(bp.key_tile);
        if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            first = plan.list[self.keys.list + step_of(tile, bp)] as usize * KEY_BLOCK;
            if comptime!(bp.key_tile < KEY_BLOCK) {
                first += tile * comptime!(bp.key_tile) % KEY_BLOCK;
            }
        }
        first
    }

    /// True if a tile may hold numbers that are not finite and hidden from some row. A full tile hides nothing.
    pub(crate) fn may_hide_not_finite(&self, boundary: bool) -> bool {
        let mut may = boundary;
        if comptime!(self.own.bp.pattern.is_planned()) {
            may = boundary && self.mask.not_finite;
        }
        may
    }
}

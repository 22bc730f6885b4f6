//! ALiBi of the rows of a query tile and the columns of its key tiles.

use crate::alibi::{AlibiArg, AlibiRow, biased};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::query_tile::{CubeTile, RowPair, TileRow};
use crate::matrix::softmax::PerRow;
use crate::matrix::stages::Stages;
use cubecl::prelude::*;

/// ALiBi of a row, whose place is the number of the key that it stands at.
#[cube]
pub(crate) fn row_alibi(
    slopes: &AlibiArg,
    own: &CubeTile,
    row: &TileRow,
) -> ComptimeOption<AlibiRow> {
    #[comptime]
    match slopes {
        ComptimeOption::Some(slopes) => ComptimeOption::new_Some(AlibiRow {
            slope: slopes[row.head],
            place: f32::cast_from((row.query + own.k_len) as i32 - own.q_len as i32),
        }),
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

/// `z`, a part of the logits of column `col` of key tile `tile`, with what ALiBi adds to those of both rows.
#[cube]
pub(crate) fn with_alibi<E: Float>(
    z: PerRow,
    rows: &RowPair,
    stages: &Stages<E>,
    tile: usize,
    col: usize,
    #[comptime] bp: MmaBlueprint,
) -> PerRow {
    #[comptime]
    match &stages.keys {
        ComptimeOption::Some(keys) => {
            let stage = tile % comptime!(bp.stages);
            let key = keys[stage * comptime!(bp.key_tile) + col];
            PerRow {
                upper: biased(&rows.upper_alibi, z.upper, key),
                lower: biased(&rows.lower_alibi, z.lower, key),
            }
        }
        ComptimeOption::None => z,
    }
}

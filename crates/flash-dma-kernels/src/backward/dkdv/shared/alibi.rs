//! ALiBi of the rows of a step's query tile and the keys of a cube.

use crate::alibi::{AlibiArg, AlibiRow};
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::queries::Step;
use cubecl::prelude::*;

/// Sets the slopes of the heads of a cube's group; the caller synchronises.
#[cube]
pub(crate) fn enter_slopes(
    to: &mut ComptimeOption<Shared<[f32]>>,
    slopes: &AlibiArg,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) {
    let first = place.kv_head * place.sizes.group;
    #[comptime]
    match slopes {
        ComptimeOption::Some(slopes) => {
            let to = to.as_mut().unwrap();
            let mut head = UNIT_POS as usize;
            while head < comptime!(bp.slopes) {
                to[head] = slopes[first + head];
                head += comptime!(bp.units());
            }
        }
        ComptimeOption::None => {}
    }
}

/// ALiBi of row `row` of the tile of step `at`, placed at its query's index; without a query, that of another row.
#[cube]
pub(crate) fn row_alibi(
    slopes: &ComptimeOption<Shared<[f32]>>,
    at: &Step,
    row: usize,
    #[comptime] bp: DkdvBlueprint,
) -> ComptimeOption<AlibiRow> {
    #[comptime]
    match slopes {
        ComptimeOption::Some(slopes) => {
            let queries = comptime!(bp.queries());
            let head = min(at.head + row / queries, comptime!(bp.slopes - 1));
            ComptimeOption::new_Some(AlibiRow {
                slope: slopes[head],
                place: f32::cast_from((at.query + row % queries) as u32),
            })
        }
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

/// The place of a key: the index of the query at the same position, which may not exist. Not read without ALiBi.
#[cube]
pub(crate) fn key_place(
    key: usize,
    q_len: usize,
    k_len: usize,
    #[comptime] bp: DkdvBlueprint,
) -> f32 {
    let mut place = 0.0f32;
    if comptime!(bp.slopes > 0) {
        place = f32::cast_from((key + q_len) as i32 - k_len as i32);
    }
    place
}

/// The place of the key of a lane at index `local` of its tile. Not read without ALiBi.
#[cube]
pub(crate) fn local_place(places: &ComptimeOption<Shared<[f32]>>, local: usize) -> f32 {
    #[comptime]
    match places {
        ComptimeOption::Some(places) => places[local],
        ComptimeOption::None => f32::new(0.0),
    }
}

//! The words of a step's queries and of a tile's keys for the dropout mask, in shared memory.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::KeyTileSource;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::dropout::{DropoutArg, column_word};
use crate::matrix::dropout::pair_at;
use cubecl::prelude::*;

/// Sets the words of the keys of a tile, one unit each; the caller synchronises.
#[cube]
pub(crate) fn enter_columns(
    columns: &mut ComptimeOption<Shared<[u32]>>,
    dropout: &DropoutArg,
    source: &KeyTileSource,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) {
    #[comptime]
    match dropout {
        ComptimeOption::Some(seed) => {
            let unit = UNIT_POS as usize;
            if unit < comptime!(bp.keys()) && place.start + unit < place.count {
                let columns = columns.as_mut().unwrap();
                columns[unit] = column_word(place.key_of(source, unit, bp), seed);
            }
        }
        ComptimeOption::None => {}
    }
}

/// The words of row `stage * rows + row` of all stages and of the row after it.
#[cube]
pub(crate) fn words_of_rows(
    words: &ComptimeOption<Shared<[u32]>>,
    stage: usize,
    row: usize,
    #[comptime] bp: DkdvBlueprint,
) -> ComptimeOption<Vector<u32, Const<2>>> {
    #[comptime]
    match words {
        ComptimeOption::Some(words) => {
            ComptimeOption::new_Some(pair_at(words, stage * comptime!(bp.rows) + row))
        }
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

//! Dropout of the pairs of a tile of queries and a tile of keys.

use crate::dropout::{DropoutArg, DropoutSeed, column_word, head_word, row_word};
use crate::portable::args::Sizes;
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::TileRows;
use crate::portable::visibility::query_and_key;
use cubecl::prelude::*;

/// The words of a tile's queries and of a tile's keys, in shared memory.
#[derive(CubeType)]
pub(crate) struct TileMask {
    rows: Shared<[u32]>,
    columns: Shared<[u32]>,
    seed: DropoutSeed,
    /// True if the keys are the outer rows.
    #[cube(comptime)]
    keys_outer: bool,
}

#[cube]
impl TileMask {
    /// Allocates room for the queries and keys of a tile, if there is dropout.
    pub(crate) fn of(
        dropout: &DropoutArg,
        #[comptime] keys_outer: bool,
        #[comptime] bp: Blueprint,
    ) -> ComptimeOption<TileMask> {
        #[comptime]
        match dropout {
            ComptimeOption::Some(seed) => ComptimeOption::new_Some(TileMask {
                rows: Shared::<[u32]>::new_slice(comptime!(bp.rows(!keys_outer))),
                columns: Shared::<[u32]>::new_slice(comptime!(bp.rows(keys_outer))),
                seed: seed.copied(),
                keys_outer,
            }),
            ComptimeOption::None => ComptimeOption::new_None(),
        }
    }

    /// Sets the queries of a tile. All units cooperate; the caller synchronises.
    pub(crate) fn set_queries(
        &mut self,
        queries: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        let head = head_word(queries.batch * sizes.q_heads + queries.head, &self.seed);
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(!self.keys_outer)) {
            self.rows[row] = row_word(head, queries.first + row, sizes.q_len, sizes.k_len);
            row += comptime!(bp.units());
        }
    }

    /// Sets the keys of a tile. All units cooperate; the caller synchronises.
    pub(crate) fn set_keys(&mut self, keys: &TileRows, #[comptime] bp: Blueprint) {
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(self.keys_outer)) {
            let n = keys.first + row;
            let mut word = 0u32;
            if n < keys.end {
                word = column_word(keys.index(n), &self.seed);
            }
            self.columns[row] = word;
            row += comptime!(bp.units());
        }
    }

    /// A value of a pair times the factor of its probability.
    pub(crate) fn dropped(&self, value: f32, outer: usize, inner: usize) -> f32 {
        let (query, key) = query_and_key(outer, inner, self.keys_outer);
        value * (self.seed).weight(self.rows[query], self.columns[key])
    }
}

//! ALiBi of the pairs of a tile of queries and a tile of keys.

use crate::alibi::AlibiArg;
use crate::portable::args::Sizes;
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::TileRows;
use crate::portable::visibility::query_and_key;
use cubecl::prelude::*;

/// The places of a tile's queries and of a tile's keys, and the slope of the queries' head, in shared memory.
#[derive(CubeType)]
pub(crate) struct TileAlibi<'a> {
    slopes: &'a Tensor<f32>,
    slope: Shared<[f32]>,
    /// A query has the place of the key at the same position: the last query that of the last key.
    queries: Shared<[i32]>,
    keys: Shared<[i32]>,
    /// True if the keys are the outer rows.
    #[cube(comptime)]
    keys_outer: bool,
}

#[cube]
impl<'a> TileAlibi<'a> {
    /// Allocates room for the queries and keys of a tile, if there is ALiBi.
    pub(crate) fn of(
        alibi: &'a AlibiArg,
        #[comptime] keys_outer: bool,
        #[comptime] bp: Blueprint,
    ) -> ComptimeOption<TileAlibi<'a>> {
        #[comptime]
        match alibi {
            ComptimeOption::Some(slopes) => ComptimeOption::new_Some(TileAlibi::<'a> {
                slopes,
                slope: Shared::<[f32]>::new_slice(1usize),
                queries: Shared::<[i32]>::new_slice(comptime!(bp.rows(!keys_outer))),
                keys: Shared::<[i32]>::new_slice(comptime!(bp.rows(keys_outer))),
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
        if UNIT_POS == 0 {
            self.slope[0] = self.slopes[queries.head];
        }
        let first = (queries.first + sizes.k_len) as i32 - sizes.q_len as i32;
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(!self.keys_outer)) {
            self.queries[row] = first + row as i32;
            row += comptime!(bp.units());
        }
    }

    /// Sets the keys of a tile. All units cooperate; the caller synchronises.
    pub(crate) fn set_keys(&mut self, keys: &TileRows, #[comptime] bp: Blueprint) {
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(self.keys_outer)) {
            let n = keys.first + row;
            let mut key = 0i32;
            if n < keys.end {
                key = keys.index(n) as i32;
            }
            self.keys[row] = key;
            row += comptime!(bp.units());
        }
    }

    pub(crate) fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32 {
        let (query, key) = query_and_key(outer, inner, self.keys_outer);
        let distance = f32::cast_from(self.queries[query] - self.keys[key]).abs();
        fma(-self.slope[0], distance, logit)
    }
}

/// Adds ALiBi, if there is any, to the logit of a pair.
#[cube]
pub(crate) fn with_alibi(
    alibi: &ComptimeOption<TileAlibi>,
    logit: f32,
    outer: usize,
    inner: usize,
) -> f32 {
    #[comptime]
    match alibi {
        ComptimeOption::Some(alibi) => alibi.biased(logit, outer, inner),
        ComptimeOption::None => logit,
    }
}

//! The keys that a query tile may attend to, streamed tile by tile.

use crate::pattern::position::position;
use crate::portable::args::{Keys, KeysExpand, ListedIntervals, Sizes};
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::{RowList, TileRows};
use cubecl::prelude::*;

/// Location of the keys of a query tile: in its list if they have intervals, otherwise all keys up to the last that one
/// of its queries may see.
#[derive(CubeType)]
pub(crate) struct KeyTiles<'a> {
    /// The lists, if the keys have intervals.
    pub listed: ComptimeOption<&'a ListedIntervals>,
    batch: usize,
    kv_head: usize,
    /// First element of the list.
    base: usize,
    /// Keys of the list that every query of the tile attends to; they come first.
    pub full: usize,
    total: usize,
}

#[cube]
impl<'a> KeyTiles<'a> {
    /// The keys of a query tile of a kv head. Without causal masking all tiles share list 0; with it, the launch lists
    /// the tile of `CUBE_POS_X` at `CUBE_POS_X`.
    pub(crate) fn of_queries(
        source: &'a Keys<ListedIntervals>,
        queries: &TileRows,
        kv_head: usize,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) -> KeyTiles<'a> {
        let batch = queries.batch;
        #[comptime]
        match source {
            Keys::Intervals(listed) => {
                let (list, counts) = (&listed.list, &listed.counts);
                let row = batch * sizes.kv_heads + kv_head;
                let mut tile = 0usize;
                if comptime!(bp.causal) {
                    tile = CUBE_POS_X as usize;
                }
                let at = row * counts.stride(0) + tile * counts.stride(1);
                KeyTiles::<'a> {
                    listed: ComptimeOption::new_Some(listed),
                    batch,
                    kv_head,
                    base: row * list.stride(0) + tile * list.stride(1),
                    full: counts[at] as usize,
                    total: counts[at + 1] as usize,
                }
            }
            _ => {
                let last = min(queries.first + comptime!(bp.outer_rows()), sizes.q_len) - 1;
                let seen = position(last, sizes.q_len, sizes.k_len, bp.causal) + 1;
                KeyTiles::<'a> {
                    listed: ComptimeOption::new_None(),
                    batch,
                    kv_head,
                    base: 0usize,
                    full: 0usize,
                    total: max(seen, 0i32) as usize,
                }
            }
        }
    }

    pub(crate) fn count(&self, #[comptime] bp: Blueprint) -> usize {
        self.total.div_ceil(comptime!(bp.inner_rows()))
    }

    pub(crate) fn tile(&self, n: usize, #[comptime] bp: Blueprint) -> TileRows<'a> {
        TileRows::<'a> {
            batch: self.batch,
            head: self.kv_head,
            first: n * comptime!(bp.inner_rows()),
            end: self.total,
            list: self.row_list(),
        }
    }

    fn row_list(&self) -> ComptimeOption<RowList<'a>> {
        #[comptime]
        match self.listed {
            ComptimeOption::Some(listed) => ComptimeOption::new_Some(RowList::<'a> {
                list: &listed.list,
                base: self.base,
            }),
            ComptimeOption::None => ComptimeOption::new_None(),
        }
    }
}

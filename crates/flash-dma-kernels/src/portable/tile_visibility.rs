//! The pairs of a tile of queries and a tile of keys that attend: one variant for each representation in shared memory.

use crate::portable::alibi::{TileAlibi, with_alibi};
use crate::portable::args::{Keys, KeysExpand, LogitTerms, OrderedIntervals, PairBiasArg, Sizes};
use crate::portable::bits::QueryBits;
use crate::portable::blueprint::Blueprint;
use crate::portable::dropout::TileMask;
use crate::portable::intervals::KeyIntervals;
use crate::portable::keys::KeyTiles;
use crate::portable::memory::TileRows;
use crate::portable::visibility::{Visibility, VisibilityExpand};
use cubecl::prelude::*;

/// The [`Visibility`] of a blueprint's pattern, its ALiBi and its dropout.
#[derive(CubeType)]
pub(crate) struct TileVisibility<'a> {
    pairs: TilePairs<'a>,
    alibi: ComptimeOption<TileAlibi<'a>>,
    dropout: ComptimeOption<TileMask>,
}

/// The pairs that attend: one variant for each representation in shared memory. A new pattern is a value of
/// [`Pattern`](crate::pattern::kind::Pattern) that one of them represents.
#[expect(dead_code, reason = "kernels make the type that CubeCL derives")]
#[derive(CubeType)]
enum TilePairs<'a> {
    /// An interval of positions per key.
    Intervals(KeyIntervals),
    /// A word per query, with a bit per key.
    Bits(QueryBits<'a>),
}

#[cube]
impl<'a> TileVisibility<'a> {
    /// Allocates room for a tile of queries and a tile of keys; the keys are the outer rows if `keys_outer`.
    pub(crate) fn new<I: LaunchArg>(
        keys: &'a Keys<I>,
        terms: &'a LogitTerms,
        #[comptime] keys_outer: bool,
        #[comptime] bp: Blueprint,
    ) -> TileVisibility<'a> {
        let pairs = TilePairs::new::<I>(keys, &terms.bias, keys_outer, bp);
        TileVisibility::<'a> {
            pairs,
            alibi: TileAlibi::of(&terms.alibi, keys_outer, bp),
            dropout: TileMask::of(&terms.dropout, keys_outer, bp),
        }
    }

    /// True if some query may attend to some key of the tiles: the same for all units of a cube, which skips them
    /// otherwise.
    pub(crate) fn is_active(
        &self,
        queries: &TileRows,
        keys: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) -> bool {
        #[comptime]
        match &self.pairs {
            TilePairs::Intervals(_) => true,
            TilePairs::Bits(bits) => bits.is_active(queries, keys, sizes, bp),
        }
    }

    /// Sets a tile's queries for dropout and ALiBi.
    fn place_queries(&mut self, queries: &TileRows, sizes: &Sizes, #[comptime] bp: Blueprint) {
        #[comptime]
        match &mut self.dropout {
            ComptimeOption::Some(mask) => mask.set_queries(queries, sizes, bp),
            ComptimeOption::None => {}
        }
        #[comptime]
        match &mut self.alibi {
            ComptimeOption::Some(alibi) => alibi.set_queries(queries, sizes, bp),
            ComptimeOption::None => {}
        }
    }

    /// Sets a tile's keys for dropout and ALiBi.
    fn place_keys(&mut self, keys: &TileRows, #[comptime] bp: Blueprint) {
        #[comptime]
        match &mut self.dropout {
            ComptimeOption::Some(mask) => mask.set_keys(keys, bp),
            ComptimeOption::None => {}
        }
        #[comptime]
        match &mut self.alibi {
            ComptimeOption::Some(alibi) => alibi.set_keys(keys, bp),
            ComptimeOption::None => {}
        }
    }

    /// Sets the queries that a cube owns. A query whose LSE, if given, is −∞ attends to nothing.
    pub(crate) fn own_queries(
        &mut self,
        queries: &TileRows,
        lse: ComptimeOption<&Shared<[f32]>>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        self.place_queries(queries, sizes, bp);
        #[comptime]
        match &mut self.pairs {
            TilePairs::Intervals(intervals) => {
                intervals.set_queries(queries, lse, sizes, bp);
            }
            TilePairs::Bits(_) => {}
        }
    }

    /// Sets the keys that a cube owns, with the keys' intervals if they have any.
    pub(crate) fn own_keys(
        &mut self,
        source: &Keys<OrderedIntervals>,
        keys: &TileRows,
        #[comptime] bp: Blueprint,
    ) {
        self.place_keys(keys, bp);
        #[comptime]
        match &mut self.pairs {
            TilePairs::Intervals(intervals) =>
            {
                #[comptime]
                match source {
                    Keys::Intervals(source) => intervals.set_ordered(source, keys, bp),
                    Keys::All | Keys::Planned(_) => {}
                }
            }
            TilePairs::Bits(_) => {}
        }
    }

    /// Sets the keys of a tile that streams past the `queries`.
    pub(crate) fn meet_keys(
        &mut self,
        tiles: &KeyTiles,
        keys: &TileRows,
        queries: &TileRows,
        lse: ComptimeOption<&Shared<[f32]>>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        self.place_keys(keys, bp);
        #[comptime]
        match &mut self.pairs {
            TilePairs::Intervals(intervals) => intervals.set_listed(tiles, keys, bp),
            TilePairs::Bits(bits) => bits.set(queries, keys, lse, sizes, bp),
        }
    }

    /// Sets the queries of a tile that streams past the `keys`. A query whose LSE is −∞ attends to nothing.
    pub(crate) fn meet_queries(
        &mut self,
        queries: &TileRows,
        keys: &TileRows,
        lse: &Shared<[f32]>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        let lse = ComptimeOption::new_Some(lse);
        self.place_queries(queries, sizes, bp);
        #[comptime]
        match &mut self.pairs {
            TilePairs::Intervals(intervals) => {
                intervals.set_queries(queries, lse, sizes, bp);
            }
            TilePairs::Bits(bits) => bits.set(queries, keys, lse, sizes, bp),
        }
    }

    /// The first and one past the last query that attends to any of the keys that a cube owns; the same number twice if
    /// none does. Call it after a synchronisation.
    pub(crate) fn queries(
        &self,
        keys: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) -> (usize, usize) {
        #[comptime]
        match &self.pairs {
            TilePairs::Intervals(intervals) => intervals.queries(sizes, bp),
            TilePairs::Bits(bits) => bits.queries(keys, sizes, bp),
        }
    }
}

#[cube]
impl<'a> TilePairs<'a> {
    /// Allocates room for a tile of queries and a tile of keys; the keys are the outer rows if `keys_outer`.
    fn new<I: LaunchArg>(
        keys: &'a Keys<I>,
        bias: &'a PairBiasArg,
        #[comptime] keys_outer: bool,
        #[comptime] bp: Blueprint,
    ) -> TilePairs<'a> {
        #[comptime]
        match keys {
            Keys::All => {
                let plan = ComptimeOption::new_None();
                TilePairs::new_Bits(QueryBits::new(plan, bias, keys_outer, bp))
            }
            Keys::Planned(plan) => {
                let plan = ComptimeOption::new_Some(plan);
                TilePairs::new_Bits(QueryBits::new(plan, bias, keys_outer, bp))
            }
            Keys::Intervals(_) => TilePairs::new_Intervals(KeyIntervals::new(keys_outer, bp)),
        }
    }
}

#[cube]
impl<'a> Visibility for TileVisibility<'a> {
    fn selected(&self, outer: usize, inner: usize) -> bool {
        #[comptime]
        match &self.pairs {
            TilePairs::Intervals(intervals) => intervals.selected(outer, inner),
            TilePairs::Bits(bits) => bits.selected(outer, inner),
        }
    }

    fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32 {
        let logit = with_alibi(&self.alibi, logit, outer, inner);
        #[comptime]
        match &self.pairs {
            TilePairs::Intervals(intervals) => intervals.biased(logit, outer, inner),
            TilePairs::Bits(bits) => bits.biased(logit, outer, inner),
        }
    }

    fn dropped(&self, value: f32, outer: usize, inner: usize) -> f32 {
        #[comptime]
        match &self.dropout {
            ComptimeOption::Some(mask) => mask.dropped(value, outer, inner),
            ComptimeOption::None => value,
        }
    }
}

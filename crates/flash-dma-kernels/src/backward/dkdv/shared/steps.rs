//! The steps of a cube: the query tiles that its key tile streams, of one group of heads each.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::{OwnKey, own_key};
use crate::backward::dkdv::shared::room_if;
use crate::matrix::ptx::{global_address, read_ahead, uniform, uniform_address};
use crate::pattern::intervals::classes::ChunkQueries;
use crate::pattern::layout::{HEAD_BITS, QUERY_LIST_HEADER};
use cubecl::prelude::*;

/// The steps of a cube, in order: a range's tiles by group of heads or, if `bp.pattern.is_planned()`, a list's entries.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepOrder {
    pub count: usize,
    pub range: Range,
    pub list: StepList,
}

#[cube]
impl StepOrder {
    /// The steps of this cube's key tile at `place`; `bounds` has the keys' queries unless `bp.pattern.is_planned()`.
    pub(crate) fn of_cube(
        source: &KeyTileSource,
        grid: &KeyGrid,
        place: &ChunkTile,
        bounds: &KeyBounds,
        #[comptime] bp: DkdvBlueprint,
    ) -> StepOrder {
        if comptime!(bp.pattern.is_planned()) {
            let list = StepList::of_cube(source, grid, place);
            StepOrder {
                count: list.total,
                range: Range::none(),
                list,
            }
        } else {
            let range = bounds.queries(place, bp);
            StepOrder {
                count: range.tiles * (place.sizes.group / comptime!(bp.heads)),
                range,
                list: StepList::none(),
            }
        }
    }

    pub(crate) fn first(&self, #[comptime] bp: DkdvBlueprint) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(self.list.entry(0usize), bp)
        } else {
            Cursor::first(&self.range)
        }
    }

    /// Step `turn`, for infrequent use: a [`Cursor`] that moves along needs no division.
    pub(crate) fn at(&self, turn: usize, #[comptime] bp: DkdvBlueprint) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(self.list.entry(turn), bp)
        } else {
            Cursor {
                tile: self.range.first + turn % self.range.tiles,
                head: turn / self.range.tiles * comptime!(bp.heads),
            }
        }
    }

    /// True if all rows of step `turn`, which begins at query `query`, see all keys.
    pub(crate) fn is_full(&self, turn: usize, query: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        if comptime!(bp.pattern.is_planned()) {
            turn < self.list.full
        } else {
            comptime!(bp.rows == bp.queries() * bp.heads)
                && self.range.full_from <= query as i32
                && (query + comptime!(bp.queries())) as i32 <= self.range.full_to
        }
    }

    /// True if every key learns from each of its queries of the step from query `query` on; `bp.kept` only.
    pub(crate) fn all_learn(&self, query: usize) -> bool {
        self.range.all_learn <= query as i32
    }

    /// True if some key learns from a query of that step; `bp.kept` only.
    pub(crate) fn some_learn(&self, query: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        self.range.some_learn < (query + comptime!(bp.queries())) as i32
    }
}

/// The query tiles that a key tile streams.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Range {
    pub first: usize,
    pub tiles: usize,
    /// Every key is attended to by the queries `full_from .. full_to`, if any.
    pub full_from: i32,
    pub full_to: i32,
    /// With `bp.kept`: no key learns from a query before `some_learn`, and each from those of its queries that are not
    /// before `all_learn`.
    pub some_learn: i32,
    pub all_learn: i32,
}

#[cube]
impl Range {
    pub(crate) fn none() -> Range {
        Range {
            first: 0usize,
            tiles: 0usize,
            full_from: 0i32,
            full_to: 0i32,
            some_learn: 0i32,
            all_learn: 0i32,
        }
    }
}

/// The queries and the heads of a step. Steps run over a range's tiles for each group of heads in turn.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Cursor {
    pub tile: usize,
    /// The first head, within the group of the kv head.
    pub head: usize,
}

#[cube]
impl Cursor {
    pub(crate) fn first(range: &Range) -> Cursor {
        Cursor {
            tile: range.first,
            head: 0usize,
        }
    }

    /// The step of an entry of a [`StepList`].
    pub(crate) fn listed(entry: u32, #[comptime] bp: DkdvBlueprint) -> Cursor {
        Cursor {
            tile: (entry >> comptime!(HEAD_BITS as u32)) as usize,
            head: (entry & comptime!((1u32 << HEAD_BITS) - 1)) as usize * comptime!(bp.heads),
        }
    }

    pub(crate) fn advance(&mut self, range: &Range, #[comptime] bp: DkdvBlueprint) {
        self.tile += 1;
        if self.tile == range.first + range.tiles {
            self.tile = range.first;
            self.head += comptime!(bp.heads);
        }
    }
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepList {
    /// The offset of its first entry.
    first: u64,
    /// Number of full steps, which see all keys; they come first.
    pub full: usize,
    pub total: usize,
}

#[cube]
impl StepList {
    /// A placeholder that is never read.
    pub(crate) fn none() -> StepList {
        StepList {
            first: 0u64,
            full: 0usize,
            total: 0usize,
        }
    }

    /// The list of this cube's key tile, which is at `place`.
    fn of_cube(source: &KeyTileSource, grid: &KeyGrid, place: &ChunkTile) -> StepList {
        let plan = source.plan.as_ref().unwrap();
        let (list, counts) = (&plan.list, &plan.counts);
        let (tiles, capacity) = (grid.tiles as usize, grid.capacity as usize);
        let tile = CUBE_POS_X as usize % tiles;
        let (batch, kv_head) = (place.batch, place.kv_head);
        let row = batch * counts[0] as usize + kv_head * counts[1] as usize;
        let at = row * tiles + tile;
        let begin = at * capacity;
        StepList {
            first: uniform_address(global_address(&list[begin..begin + 1])),
            full: uniform(counts[QUERY_LIST_HEADER + at * 2] as usize),
            total: uniform(counts[QUERY_LIST_HEADER + at * 2 + 1] as usize),
        }
    }

    /// Entry `index`, clamped to the last one; the list must not be empty.
    pub(crate) fn entry(&self, index: usize) -> u32 {
        read_ahead(self.first, min(index, self.total - 1) as u32)
    }
}

/// The queries of some keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct QuerySpan {
    /// No query before `any_from` or from `any_to` on attends to any of the keys.
    pub any_from: i32,
    pub any_to: i32,
    /// The queries `full_from .. full_to`, if any, attend to all.
    pub full_from: i32,
    pub full_to: i32,
}

#[cube]
impl QuerySpan {
    /// True if no query of the tile from `query` on attends to any of the keys.
    pub(crate) fn misses(&self, query: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        query as i32 >= self.any_to || (query + comptime!(bp.queries())) as i32 <= self.any_from
    }

    /// True if all rows of the tile from query `query` on attend to all of the keys.
    pub(crate) fn fills(&self, query: usize, #[comptime] bp: DkdvBlueprint) -> bool {
        comptime!(bp.rows == bp.queries() * bp.heads)
            && self.full_from <= query as i32
            && (query + comptime!(bp.queries())) as i32 <= self.full_to
    }
}

/// The first query of the chunk from which a key's rank learns, its end if there is none; `bp.kept` only.
#[cube]
fn first_learning(
    own: &OwnKey,
    source: &KeyTileSource,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) -> i32 {
    let mut learns = own.end;
    if own.valid {
        let keys = source.intervals.as_ref().unwrap();
        let at = place.kv_row * place.sizes.k_len + own.key;
        let from = keys.kept_from.as_ref().unwrap()[at];
        let end = keys.ends[at].extract(1usize);
        let all = ChunkQueries::all(place.sizes.q_len as u32, place.sizes.k_len as u32);
        let first = all.seen(min(from, end), end, comptime!(bp.causal)).from;
        learns = select(from < end, min(max(own.first, first), own.end), own.end);
    }
    learns
}

/// The queries of a tile's keys, in shared memory.
#[derive(CubeType)]
pub(crate) struct KeyBounds {
    /// `[keys]`: first query of the chunk that attends to the key; 0 past the last key.
    pub first: Shared<[i32]>,
    /// `[keys]`: one past the last query of the chunk that does.
    pub end: Shared<[i32]>,
    /// `[keys]`: the first query of the chunk from which the key learns, `end` if there is none; `bp.kept` only.
    pub learns: ComptimeOption<Shared<[i32]>>,
}

#[cube]
impl KeyBounds {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> KeyBounds {
        KeyBounds {
            first: Shared::<[i32]>::new_aligned_slice(comptime!(bp.keys()), 128usize),
            end: Shared::<[i32]>::new_aligned_slice(comptime!(bp.keys()), 128usize),
            learns: room_if::<i32>(bp.kept, comptime!(bp.keys())),
        }
    }

    /// Enters the keys of the tile, one unit each, unless `bp.pattern.is_planned()`; the caller synchronises.
    pub(crate) fn enter(
        &mut self,
        source: &KeyTileSource,
        place: &ChunkTile,
        #[comptime] bp: DkdvBlueprint,
    ) {
        let unit = UNIT_POS as usize;
        if comptime!(!bp.pattern.is_planned()) && unit < comptime!(bp.keys()) {
            let own = own_key(unit, place, source, 0usize, false, bp);
            self.first[unit] = own.first;
            self.end[unit] = own.end;
            if comptime!(bp.kept) {
                let learns = self.learns.as_mut().unwrap();
                learns[unit] = first_learning(&own, source, place, bp);
            }
        }
    }

    /// The query tiles that attend to the keys of the tile.
    pub(crate) fn queries(&self, place: &ChunkTile, #[comptime] bp: DkdvBlueprint) -> Range {
        let span = self.span(place, 0usize, comptime!(bp.keys()));
        let mut some_learn = 0i32;
        let mut all_learn = 0i32;
        if comptime!(bp.kept) {
            some_learn = place.chunk_end;
            all_learn = place.chunk_first;
            let learns = self.learns.as_ref().unwrap();
            let mut local = UNIT_POS_X as usize;
            while local < comptime!(bp.keys()) {
                if place.start + local < place.count {
                    some_learn = min(some_learn, learns[local]);
                    all_learn = max(all_learn, learns[local]);
                }
                local += 32;
            }
            some_learn = plane_min(some_learn);
            all_learn = plane_max(all_learn);
        }
        let queries = comptime!(bp.queries());
        let first = span.any_from as usize / queries;
        let mut tiles = 0usize;
        if span.any_from < span.any_to {
            tiles = (span.any_to as usize).div_ceil(queries) - first;
        }
        Range {
            first: uniform(first),
            tiles: uniform(tiles),
            full_from: uniform(span.full_from as usize) as i32,
            full_to: uniform(span.full_to as usize) as i32,
            some_learn: uniform(some_learn as usize) as i32,
            all_learn: uniform(all_learn as usize) as i32,
        }
    }

    /// The queries of the `keys` keys from `first` on of the tile.
    pub(crate) fn span(
        &self,
        place: &ChunkTile,
        first: usize,
        #[comptime] keys: usize,
    ) -> QuerySpan {
        let mut any_from = place.chunk_end;
        let mut any_to = place.chunk_first;
        let mut full_from = place.chunk_first;
        let mut full_to = place.chunk_end;
        let mut local = UNIT_POS_X as usize;
        while local < keys {
            if place.start + first + local < place.count {
                let (from, to) = (self.first[first + local], self.end[first + local]);
                any_from = min(any_from, from);
                any_to = max(any_to, to);
                full_from = max(full_from, from);
                full_to = min(full_to, to);
            }
            local += 32;
        }
        QuerySpan {
            any_from: plane_min(any_from),
            any_to: plane_max(any_to),
            full_from: plane_max(full_from),
            full_to: plane_min(full_to),
        }
    }
}

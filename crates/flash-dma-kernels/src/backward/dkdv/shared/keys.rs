//! The keys of a key tile, and the queries that attend to them.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::Range;
use cubecl::prelude::*;

/// A key of the tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct OwnKey {
    /// Whether the slot holds a key.
    pub valid: bool,
    /// Its index in the head.
    pub key: usize,
    /// Its row of the gradients.
    pub row: usize,
    /// Its queries in the chunk.
    pub first: i32,
    pub end: i32,
    pub score: f32,
}

/// A cube's key tile, and its chunk of queries.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkTile {
    /// The tile's first slot among those of the chunk, and how many keys the chunk has.
    pub start: usize,
    pub count: usize,
    /// The tile's first entry in the list.
    pub list_row: usize,
    /// The sequence, its kv head, and that head counted over all sequences.
    pub batch: usize,
    pub kv_head: usize,
    pub kv_row: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// The chunk's queries.
    pub chunk_first: i32,
    pub chunk_end: i32,
}

#[cube]
impl ChunkTile {
    /// The key tile of this cube; ends the cube where the chunk has fewer tiles than others.
    pub(crate) fn of_cube(
        source: &KeyTileSource,
        grid: &KeyGrid,
        kv_heads: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let item = CUBE_POS_X as usize / grid.slots as usize;
        let kv_row = item / grid.chunks as usize;
        let (batch, kv_head) = (kv_row / kv_heads, kv_row % kv_heads);
        let start = CUBE_POS_X as usize % grid.slots as usize * comptime!(bp.keys());
        let chunk_first = (item % grid.chunks as usize * grid.chunk as usize) as i32;
        let chunk_end = min(chunk_first + grid.chunk as i32, q_len as i32);
        let mut count = k_len;
        if comptime!(bp.pattern.has_intervals()) {
            count = source.counts[item] as usize;
        }
        if start >= count {
            terminate!();
        }
        ChunkTile {
            start,
            count,
            list_row: item * grid.capacity as usize + start,
            batch,
            kv_head,
            kv_row,
            q_len,
            k_len,
            chunk_first,
            chunk_end,
        }
    }
}

#[cube]
impl OwnKey {
    /// Sets its bias for head `head` of the group.
    pub(crate) fn bias(&mut self, mask: &KeyMask, head: usize) {
        self.score = mask.bias(head, 0usize, self.behind(mask));
    }

    /// Its offset from the first key of `mask`, which contains it; 0 if it is not a key.
    pub(crate) fn behind(&self, mask: &KeyMask) -> usize {
        select(self.valid, self.key - mask.first, 0usize)
    }
}

/// The key of slot `slot` of the tile; a slot past the last key is seen by no query, but does not narrow
/// the queries that all keys share.
#[cube]
pub(crate) fn own_key(
    slot: usize,
    place: &ChunkTile,
    source: &KeyTileSource,
    score_row: usize,
    #[comptime] scored: bool,
    #[comptime] bp: DkdvBlueprint,
) -> OwnKey {
    let interval_row = place.kv_row * place.k_len;
    let mut own = OwnKey {
        valid: place.start + slot < place.count,
        key: 0usize,
        row: 0usize,
        first: 0i32,
        end: i32::new(comptime!(i32::MAX as i64)),
        score: 0.0f32,
    };
    if own.valid {
        // Positions first, then queries.
        own.key = place.start + slot;
        let mut first = own.key as i32;
        let mut end = place.k_len as i32;
        if comptime!(bp.pattern.has_intervals()) {
            own.key = source.list[place.list_row + slot] as usize;
            let interval = source.intervals[interval_row + own.key];
            first = interval.extract(0usize) as i32;
            end = interval.extract(1usize) as i32;
        }
        own.row = interval_row + own.key;
        if comptime!(bp.parts) {
            own.row = place.list_row + slot;
        }
        if comptime!(scored) {
            own.score = source.scores[score_row + own.key];
        }
        if comptime!(bp.causal) {
            first += place.q_len as i32 - place.k_len as i32;
            end += place.q_len as i32 - place.k_len as i32;
        } else {
            // All queries stand at the last key.
            end = select(end >= place.k_len as i32, place.q_len as i32, 0i32);
            first = 0i32;
        }
        own.first = max(first, place.chunk_first);
        own.end = min(end, place.chunk_end);
    }
    own
}

/// Offset of the scores of a kv head's keys, or of the biases that its query heads share.
#[cube]
pub(crate) fn score_row(
    scores: &Tensor<f32>,
    batch: usize,
    kv_head: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let mut row = batch * scores.stride(0) + kv_head * scores.stride(1);
    if comptime!(bp.pattern.has_key_bias() && !bp.pattern.has_head_bias()) {
        // An axis of size 1 is broadcast, regardless of its stride.
        row = min(batch, scores.shape(0) - 1) * scores.stride(0)
            + min(kv_head, scores.shape(1) - 1) * scores.stride(1);
    }
    row
}

/// The query tiles of a key tile whose first queries and ends are in shared memory.
#[cube]
pub(crate) fn query_range(
    firsts: &Shared<[i32]>,
    ends: &Shared<[i32]>,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) -> Range {
    let mut any_from = place.chunk_end;
    let mut any_to = place.chunk_first;
    let mut full_from = place.chunk_first;
    let mut full_to = place.chunk_end;
    let mut slot = UNIT_POS_X as usize;
    while slot < comptime!(bp.keys()) {
        if place.start + slot < place.count {
            let (first, end) = (firsts[slot], ends[slot]);
            any_from = min(any_from, first);
            any_to = max(any_to, end);
            full_from = max(full_from, first);
            full_to = min(full_to, end);
        }
        slot += 32;
    }
    any_from = plane_min(any_from);
    any_to = plane_max(any_to);
    let queries = comptime!(bp.queries());
    let mut range = Range {
        first: any_from as usize / queries,
        tiles: 0usize,
        full_from: plane_max(full_from),
        full_to: plane_min(full_to),
    };
    if any_from < any_to {
        range.tiles = (any_to as usize).div_ceil(queries) - range.first;
    }
    range
}

//! The keys of a key tile, and the queries that attend to them.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::steps::Range;
use crate::host::engine::Instruction;
use crate::matrix::fragment::swizzle;
use crate::matrix::stages::RowAddress;
use crate::matrix::wgmma::panel::group_place;
use crate::vectors::Chunk;
use cubecl::prelude::barrier::copy_async;
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
        let item = CUBE_POS_X as usize / grid.tiles as usize;
        let kv_row = item / grid.chunks as usize;
        let (batch, kv_head) = (kv_row / kv_heads, kv_row % kv_heads);
        let start = CUBE_POS_X as usize % grid.tiles as usize * comptime!(bp.keys());
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

    /// The index of the key in slot `slot` of the tile.
    pub(crate) fn key_of(&self, list: &[u32], slot: usize, #[comptime] bp: DkdvBlueprint) -> usize {
        let mut key = self.start + slot;
        if comptime!(bp.pattern.has_intervals()) {
            key = list[self.list_row + slot] as usize;
        }
        key
    }

    /// The row of the gradients of the key in slot `slot`.
    pub(crate) fn row_of(&self, list: &[u32], slot: usize, #[comptime] bp: DkdvBlueprint) -> usize {
        let mut row = self.list_row + slot;
        if comptime!(!bp.parts) {
            row = self.kv_row * self.k_len + self.key_of(list, slot, bp);
        }
        row
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
/// the queries that all keys share. Its score is read if it is `scored`.
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

/// The queries of a tile's keys, in shared memory.
#[derive(CubeType)]
pub(crate) struct KeyBounds {
    /// `[keys]`: first query of the chunk that attends to the key; 0 past the last key.
    pub first: Shared<[i32]>,
    /// `[keys]`: one past the last query of the chunk that does.
    pub end: Shared<[i32]>,
}

#[cube]
impl KeyBounds {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> KeyBounds {
        KeyBounds {
            first: Shared::<[i32]>::new_aligned_slice(comptime!(bp.keys()), 128usize),
            end: Shared::<[i32]>::new_aligned_slice(comptime!(bp.keys()), 128usize),
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
        }
    }

    /// The query tiles that attend to the keys of the tile.
    pub(crate) fn queries(&self, place: &ChunkTile, #[comptime] bp: DkdvBlueprint) -> Range {
        let mut any_from = place.chunk_end;
        let mut any_to = place.chunk_first;
        let mut full_from = place.chunk_first;
        let mut full_to = place.chunk_end;
        let mut slot = UNIT_POS_X as usize;
        while slot < comptime!(bp.keys()) {
            if place.start + slot < place.count {
                let (first, end) = (self.first[slot], self.end[slot]);
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
}

/// Starts the copies of the tile's keys and values to shared memory; rows past the last key become zeros.
#[cube]
pub(crate) fn copy_keys<E: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    place: &ChunkTile,
    k: &mut Shared<[Chunk<E>]>,
    v: &mut Shared<[Chunk<E>]>,
    #[comptime] bp: DkdvBlueprint,
) {
    let chunks = comptime!(bp.chunks());
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let v_rows = RowAddress::of::<E>(&inputs.v, place.batch, place.kv_head);
    let mut at = UNIT_POS as usize;
    while at < comptime!(bp.keys() * bp.chunks()) {
        let (row, col) = (at / chunks, at % chunks);
        let to = match comptime!(bp.instruction) {
            Instruction::Mma => swizzle(row, col, chunks),
            Instruction::Wgmma => group_place(row, col, chunks),
        };
        if place.start + row < place.count {
            let key = place.key_of(&source.list, row, bp);
            let from = k_rows.base + key * k_rows.stride + col;
            copy_async(&inputs.k[from..from + 1], &mut k[to..to + 1], 8u32);
            let from = v_rows.base + key * v_rows.stride + col;
            copy_async(&inputs.v[from..from + 1], &mut v[to..to + 1], 8u32);
        } else {
            k[to] = Vector::new(E::from_int(0));
            v[to] = Vector::new(E::from_int(0));
        }
        at += comptime!(bp.units());
    }
}

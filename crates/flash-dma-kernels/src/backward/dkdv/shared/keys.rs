//! The keys of a key tile, and the queries that attend to them.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::host::engine::Instruction;
use crate::matrix::fragment::swizzle;
use crate::matrix::stages::RowAddress;
use crate::matrix::wgmma::panel::group_place;
use crate::pattern::intervals::classes::{ChunkQueries, QueryChunks};
use crate::vectors::Segment;
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

#[derive(CubeType, Clone, Copy)]
pub(crate) struct OwnKey {
    /// True if there is such a key.
    pub valid: bool,
    /// The key's index in the head.
    pub key: usize,
    pub row: usize,
    /// The key's queries in the chunk.
    pub first: i32,
    pub end: i32,
    pub score: f32,
}

#[cube]
impl OwnKey {
    /// Sets the key's bias for head `head` of the group.
    pub(crate) fn bias(&mut self, mask: &KeyMask, head: usize) {
        self.score = mask.bias(head, 0usize, self.behind(mask));
    }

    /// The offset from the first key of `mask`, which contains the key; 0 if it is not a key.
    pub(crate) fn behind(&self, mask: &KeyMask) -> usize {
        select(self.valid, self.key - mask.first, 0usize)
    }
}

/// The key at index `local` of the tile. An index past the last key is seen by no query, but does not narrow the
/// queries that all keys share. The score is read if it is `scored`.
#[cube]
pub(crate) fn own_key(
    local: usize,
    place: &ChunkTile,
    source: &KeyTileSource,
    score_row: usize,
    #[comptime] scored: bool,
    #[comptime] bp: DkdvBlueprint,
) -> OwnKey {
    let interval_row = place.kv_row * place.sizes.k_len;
    let mut own = OwnKey {
        valid: place.start + local < place.count,
        key: 0usize,
        row: 0usize,
        first: 0i32,
        end: i32::new(comptime!(i32::MAX as i64)),
        score: 0.0f32,
    };
    if own.valid {
        own.key = place.start + local;
        let mut first = own.key as u32;
        let mut end = place.sizes.k_len as u32;
        if comptime!(bp.pattern.has_intervals()) {
            let keys = source.intervals.as_ref().unwrap();
            own.key = keys.list[place.list_row + local] as usize;
            let interval = keys.ends[interval_row + own.key];
            first = interval.extract(0usize);
            end = interval.extract(1usize);
        }
        own.row = interval_row + own.key;
        if comptime!(bp.parts) {
            own.row = place.list_row + local;
        }
        if comptime!(scored) {
            own.score = source.bias.as_ref().unwrap()[score_row + own.key];
        }
        let all = ChunkQueries::all(place.sizes.q_len as u32, place.sizes.k_len as u32);
        let seen = all.seen(first, end, comptime!(bp.causal));
        own.first = max(seen.from, place.chunk_first);
        own.end = min(seen.to, place.chunk_end);
    }
    own
}

/// True if cubes of several chunks add to the gradients of the key with row `row`. This is read again when the
/// gradients are written, to save registers in the loop before.
#[cube]
pub(crate) fn is_shared(
    source: &KeyTileSource,
    chunks: &QueryChunks,
    row: usize,
    #[comptime] bp: DkdvBlueprint,
) -> bool {
    if comptime!(bp.shared_keys) {
        let interval = source.intervals.as_ref().unwrap().ends[row];
        chunks.share(interval, comptime!(bp.causal))
    } else {
        false.runtime()
    }
}

/// Offset of the scores of the kv head's keys, or of the biases that its query heads share; 0 without.
#[cube]
pub(crate) fn score_row(
    source: &KeyTileSource,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    if comptime!(bp.pattern.has_shared_score()) {
        let scores = source.bias.as_ref().unwrap();
        let (batch, kv_head) = (place.batch, place.kv_head);
        let mut row = batch * scores.stride(0) + kv_head * scores.stride(1);
        if comptime!(bp.pattern.has_key_bias()) {
            // An axis of size 1 is broadcast, regardless of its stride.
            row = min(batch, scores.shape(0) - 1) * scores.stride(0)
                + min(kv_head, scores.shape(1) - 1) * scores.stride(1);
        }
        row
    } else {
        0usize.runtime()
    }
}

/// Starts the copies of the tile's keys and values to shared memory; rows past the last key become zeros.
#[cube]
pub(crate) fn copy_keys<E: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    place: &ChunkTile,
    k: &mut Shared<[Segment<E>]>,
    v: &mut Shared<[Segment<E>]>,
    #[comptime] bp: DkdvBlueprint,
) {
    let segments = comptime!(bp.segments());
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let v_rows = RowAddress::of::<E>(&inputs.v, place.batch, place.kv_head);
    let mut at = UNIT_POS as usize;
    while at < comptime!(bp.keys() * bp.segments()) {
        let (row, col) = (at / segments, at % segments);
        let to = match comptime!(bp.instruction) {
            Instruction::Mma => swizzle(row, col, segments),
            Instruction::Wgmma => group_place(row, col, segments),
        };
        if place.start + row < place.count {
            let key = place.key_of(source, row, bp);
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

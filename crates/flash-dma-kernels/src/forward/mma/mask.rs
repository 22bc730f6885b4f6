//! A tile plan as the tensor-core kernels read it.
//!
//! With `bp.masked` the arguments of the kernels mean: `list` `[mask batch, mask heads, tiles, capacity]`, the key
//! blocks that each query tile sees, those it sees whole first; `counts` [`HEADER`] words, the key blocks
//! and the queries of the bits, and behind them `[mask batch, mask heads, tiles, 2]`, the number of whole blocks and of
//! all; `intervals` the bits, a pair of words for a query and a key block. With `bp.biased`
//! `scores` is a bias `[batch | 1, heads, 1, k_len]`. Keys are copied a block of 64 at a time, so key tiles are
//! no longer than a block.

use super::blueprint::MmaBlueprint;
use super::rows::{CubeTile, TileKeys, TileRow};
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// Words in front of the counts.
pub(crate) const HEADER: usize = 2;

/// Keys of a block.
pub(crate) const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// The row of a mask or bias, whose first two axes are those of `tensor`, that the heads of a cube read: its
/// sequence and its head.
#[cube]
pub(crate) fn broadcast_row(tensor: &Tensor<u32>, own: &CubeTile) -> (usize, usize) {
    broadcast(tensor.shape(0), tensor.shape(1), own)
}

#[cube]
fn broadcast(batches: usize, heads: usize, own: &CubeTile) -> (usize, usize) {
    let mut batch = own.batch;
    if batches == 1 {
        batch = 0usize;
    }
    (batch, own.first_head / (own.q_heads / heads))
}

/// Where the biases of the keys of a cube begin in `scores`; those of its kv head without a bias.
#[cube]
pub(crate) fn score_row(
    scores: &Tensor<f32>,
    own: &CubeTile,
    #[comptime] bp: MmaBlueprint,
) -> usize {
    let mut batch = own.batch;
    let mut head = own.kv_head;
    if comptime!(bp.biased) {
        (batch, head) = broadcast(scores.shape(0), scores.shape(1), own);
    }
    batch * scores.stride(0) + head * scores.stride(1)
}

/// Where the bits of the rows of a cube lie. Steps of 0 broadcast.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct MaskRows {
    base: usize,
    block_step: usize,
    query_step: usize,
}

#[cube]
impl MaskRows {
    /// Not read unless `bp.masked`.
    pub(crate) fn new(
        list: &Tensor<u32>,
        counts: &Tensor<u32>,
        own: &CubeTile,
        #[comptime] bp: MmaBlueprint,
    ) -> MaskRows {
        let mut rows = MaskRows {
            base: 0usize,
            block_step: 0usize,
            query_step: 0usize,
        };
        if comptime!(bp.masked) {
            let (blocks, queries) = (counts[0] as usize, counts[1] as usize);
            let (batch, head) = broadcast_row(list, own);
            rows.base = (batch * list.shape(1) + head) * blocks * queries;
            if blocks > 1 {
                rows.block_step = queries;
            }
            if queries > 1 {
                rows.query_step = 1usize;
            }
        }
        rows
    }

    /// The two words of a row and key block `block`, causal masking included.
    pub(crate) fn words(
        &self,
        bits: &[Vector<u32, Const<2>>],
        row: &TileRow,
        block: usize,
        q_len: usize,
    ) -> Vector<u32, Const<2>> {
        // A row past the last query reads that query's, and writes nothing.
        let query = min(row.query, q_len - 1);
        let words = bits[self.base + block * self.block_step + query * self.query_step];
        let end = row.position + 1 - (block * KEY_BLOCK) as i32;
        let mut seen = Vector::<u32, Const<2>>::new(0u32);
        seen.insert(0usize, words.extract(0usize) & prefix(end));
        seen.insert(1usize, words.extract(1usize) & prefix(end - 32));
        seen
    }

    /// Whether a row sees a key.
    pub(crate) fn sees(
        &self,
        bits: &[Vector<u32, Const<2>>],
        row: &TileRow,
        key: usize,
        q_len: usize,
    ) -> bool {
        let words = self.words(bits, row, key / KEY_BLOCK, q_len);
        let mut word = words.extract(0usize);
        if key % KEY_BLOCK >= 32 {
            word = words.extract(1usize);
        }
        (word >> (key % 32) as u32) & 1u32 == 1u32
    }
}

/// Whether this lane sees column `first + 2 * quad` of a key block, of which `seen` are its row's words.
#[cube]
pub(crate) fn is_set(seen: Vector<u32, Const<2>>, #[comptime] first: usize) -> bool {
    // Of this lane's columns only the constant part is left.
    let own = seen.extract(comptime!(first / 32)) >> (UNIT_POS_X % 4 * 2);
    own & comptime!(1u32 << (first % 32)) != 0u32
}

/// The lower `count` bits, of at most 32.
#[cube]
fn prefix(count: i32) -> u32 {
    let shift = (32 - max(min(count, 32i32), 0i32)) as u32;
    // A shift by 32 is none on some hardware.
    select(
        count <= 0,
        0u32,
        u32::new(comptime!(u32::MAX as i64)) >> min(shift, 31u32),
    )
}

/// The key of slot `slot` of the listed blocks.
#[cube]
pub(crate) fn listed_key(list: &Tensor<u32>, keys: &TileKeys, slot: usize) -> usize {
    list[keys.list + slot / KEY_BLOCK] as usize * KEY_BLOCK + slot % KEY_BLOCK
}

/// The logits of an accumulator of `wgmma` (see [`tile_logits`](super::logits::tile_logits)) with -inf where the two
/// rows of this lane do not see a key.
#[cube]
pub(super) fn hide_masked<N: Size>(
    logits: &Vector<f32, N>,
    seen0: Vector<u32, Const<2>>,
    seen1: Vector<u32, Const<2>>,
    #[comptime] bp: MmaBlueprint,
) -> Vector<f32, N> {
    let none = f32::new(f32::NEG_INFINITY);
    let mut hidden = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let column = comptime!(n * 8 + e);
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            hidden.insert(
                at0,
                select(is_set(seen0, column), logits.extract(at0), none),
            );
            hidden.insert(
                at1,
                select(is_set(seen1, column), logits.extract(at1), none),
            );
        }
    }
    hidden
}

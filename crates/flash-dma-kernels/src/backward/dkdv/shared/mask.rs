//! The mask and the biases of keys as the dk/dv kernel reads them, from a tile plan and from a bias, and the keys of a
//! warp that the queries of a step see.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::KeyTileSource;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::matrix::ptx::{global_address, read_ahead, shuffle, uniform, uniform_address};
use crate::pattern::position::end_key;
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Locations of the bits and biases of 16 (or 32) neighbouring keys, the first of them a multiple of 16 (or 32).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct KeyMask {
    /// Address of the word of query 0 and the first head of the group.
    words: u64,
    /// Strides: bytes between heads of the group, words between queries.
    head_step: u64,
    query_step: u32,
    /// Address of the bias of the first key, query 0 and the first head of the group, and its strides: bytes between
    /// heads and between queries, words between keys. Used if the biases differ between heads or between queries.
    bias: u64,
    bias_head: u64,
    bias_query: u64,
    bias_key: u32,
    pub(crate) first: usize,
}

#[cube]
impl KeyMask {
    /// A placeholder without mask and bias, which is never read.
    pub(crate) fn none() -> KeyMask {
        KeyMask {
            words: 0u64,
            head_step: 0u64,
            query_step: 0u32,
            bias: 0u64,
            bias_head: 0u64,
            bias_query: 0u64,
            bias_key: 0u32,
            first: 0usize,
        }
    }

    /// The mask of the keys from `first` on of the kv head of `place`. The bits are only read if
    /// `bp.pattern.is_planned()`, the biases only if `bp.pattern.has_head_bias()` or `bp.pattern.has_pair_bias()`.
    pub(crate) fn new(
        source: &KeyTileSource,
        place: &ChunkTile,
        first: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> KeyMask {
        let (batch, kv_head, sizes) = (place.batch, place.kv_head, &place.sizes);
        let mut mask = KeyMask::none();
        mask.first = uniform(first);
        if comptime!(bp.pattern.has_head_bias() || bp.pattern.has_pair_bias()) {
            let scores = source.bias.as_ref().unwrap();
            // An axis of size 1 is broadcast, regardless of its stride.
            let mut at = min(batch, scores.shape(0) - 1) * scores.stride(0);
            let heads = scores.shape(1);
            let kv_heads = sizes.q_heads / sizes.group;
            if heads > kv_heads || heads == sizes.q_heads {
                at += kv_head * sizes.group * scores.stride(1);
                mask.bias_head = uniform_address(scores.stride(1) as u64 * 4);
            } else {
                at += min(kv_head, heads - 1) * scores.stride(1);
            }
            if scores.shape(2) > 1 {
                mask.bias_query = uniform_address(scores.stride(2) as u64 * 4);
            }
            if scores.shape(3) > 1 {
                mask.bias_key = uniform(scores.stride(3)) as u32;
                at += min(first, sizes.k_len - 1) * scores.stride(3);
            }
            mask.bias = uniform_address(global_address(&scores[at..at + 1]));
        }
        if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            let (counts, bits) = (&plan.counts, &plan.bits);
            let row = batch * counts[2] as usize + kv_head * counts[3] as usize;
            let block = min(first, sizes.k_len - 1) / KEY_BLOCK;
            let pair = row * counts[5] as usize + block * counts[6] as usize;
            mask.words = uniform_address(
                global_address(&bits[pair..pair + 1]) + (first / 32 % 2 * 4) as u64,
            );
            mask.head_step = uniform_address(counts[4] as u64 * counts[5] as u64 * 8);
            mask.query_step = uniform(counts[7] as usize * 2) as u32;
        }
        mask
    }

    /// The bias of a query of head `head` of the group and the key `key` positions after the first.
    pub(crate) fn bias(&self, head: usize, query: usize, key: usize) -> f32 {
        f32::reinterpret(read_ahead(
            self.bias + head as u64 * self.bias_head + query as u64 * self.bias_query,
            key as u32 * self.bias_key,
        ))
    }

    pub(crate) fn word(&self, head: usize, query: usize) -> u32 {
        read_ahead(
            self.words + head as u64 * self.head_step,
            query as u32 * self.query_step,
        )
    }

    /// The bits of sixteen keys from a query's word, starting `further` keys after the first, lowest bit first, without
    /// the keys that causal masking hides; 0 if it is not a query.
    pub(crate) fn keys(
        &self,
        word: u32,
        query: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] further: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> u32 {
        let first = self.first + further;
        let end = end_key(query, q_len, k_len, bp.causal);
        let count = max(min(end - first as i32, 16i32), 0i32);
        let prefix = (1u32 << count as u32) - 1u32;
        let seen = (word >> (first % 32) as u32) & prefix;
        select(query < q_len, seen, 0u32)
    }
}

/// Mask words of two neighbouring queries of a step's tile: lane `l` has queries `2 l` and `2 l + 1`, modulo the tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SeenWords {
    even: u32,
    odd: u32,
}

#[cube]
impl SeenWords {
    pub(crate) fn none() -> SeenWords {
        SeenWords {
            even: 0u32,
            odd: 0u32,
        }
    }

    /// The words of the step that begins at query `step` of head `head` of the group. For a `full` step, whose queries
    /// see all keys, all bits are set and nothing is read.
    pub(crate) fn read(
        mask: &KeyMask,
        head: usize,
        step: usize,
        full: bool,
        q_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> SeenWords {
        let all = u32::new(comptime!(u32::MAX as i64));
        let mut words = SeenWords {
            even: all,
            odd: all,
        };
        if !full {
            let first = own_query(step, bp);
            words.even = mask.word(head, min(first, q_len - 1));
            words.odd = mask.word(head, min(first + 1, q_len - 1));
        }
        words
    }

    /// Bit `k + 16 e` is set if query `2 l + e` of the step that begins at query `step` sees key `k` of the sixteen
    /// keys that begin `further` keys after the first of `mask`.
    pub(crate) fn pack(
        &self,
        step: usize,
        mask: &KeyMask,
        q_len: usize,
        k_len: usize,
        #[comptime] further: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> u32 {
        let first = own_query(step, bp);
        let even = mask.keys(self.even, first, q_len, k_len, further, bp);
        let odd = mask.keys(self.odd, first + 1, q_len, k_len, further, bp);
        even | (odd << 16)
    }
}

/// The first of the two neighbouring queries whose words this lane reads, of a step that begins at query `step`.
#[cube]
fn own_query(step: usize, #[comptime] bp: DkdvBlueprint) -> usize {
    step + UNIT_POS_X as usize * 2 % comptime!(bp.queries())
}

/// The bits of the two rows among the `n`-th eight rows of a step's tile whose columns this lane holds: bit `16 e` is
/// set if row `8 n + 2 quad + e` sees the lane's first key, bit `16 e + 8` if it sees the second.
#[cube]
pub(crate) fn seen_pair(packed: u32, #[comptime] n: usize, #[comptime] bp: DkdvBlueprint) -> u32 {
    let lane = UNIT_POS_X;
    let pair = (lane % 4 + comptime!(n as u32 * 4)) % comptime!(bp.queries() as u32 / 2);
    shuffle(packed, pair) >> (lane / 4)
}

//! Biases that differ from query to query, or are the same for all keys; read from global memory when they are added.

use crate::matrix::args::KeySource;
use crate::matrix::query_tile::broadcast;
use crate::matrix::rows::{CubeTile, RowPair, TileRow};
use cubecl::prelude::*;

/// Location of the biases of a cube's pairs: the bias of a query and a key is at
/// `base + query * query_step + key * key_step`. Strides of 0 broadcast.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PairBias {
    base: usize,
    query_step: usize,
    key_step: usize,
}

#[cube]
impl PairBias {
    /// The location in the bias `[batch | 1, heads, q_len | 1, k_len | 1]` with any strides. Only read if
    /// `bp.pattern.has_pair_bias()`.
    pub(crate) fn new(source: &KeySource, own: &CubeTile) -> PairBias {
        let mut bias = PairBias {
            base: 0usize,
            query_step: 0usize,
            key_step: 0usize,
        };
        if comptime!(own.bp.pattern.has_pair_bias()) {
            let scores = source.bias.as_ref().unwrap();
            let (batch, head) = broadcast(scores.shape(0), scores.shape(1), own);
            let row = PairBias::row(scores, batch, head);
            bias.base = row.base;
            bias.query_step = row.query_step;
            bias.key_step = row.key_step;
        }
        bias
    }

    /// The location of head `head` of sequence `batch` of `scores` itself.
    pub(crate) fn row(scores: &Tensor<f32>, batch: usize, head: usize) -> PairBias {
        let mut bias = PairBias {
            base: batch * scores.stride(0) + head * scores.stride(1),
            query_step: 0usize,
            key_step: 0usize,
        };
        if scores.shape(2) > 1 {
            bias.query_step = scores.stride(2);
        }
        if scores.shape(3) > 1 {
            bias.key_step = scores.stride(3);
        }
        bias
    }

    pub(crate) fn at(&self, scores: &Tensor<f32>, query: usize, key: usize) -> f32 {
        scores[self.base + query * self.query_step + key * self.key_step]
    }

    /// The biases of an accumulator of `wgmma` (see [`tile_logits`](crate::matrix::logits::tile_logits)) of `keys`
    /// columns from key `first` on, for this lane's two rows. Past the last row or key the last one's bias is read, and
    /// not used.
    pub(crate) fn tile<N: Size>(
        &self,
        scores: &Tensor<f32>,
        row0: &TileRow,
        row1: &TileRow,
        first: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] keys: usize,
    ) -> Vector<f32, N> {
        let from0 = self.base + min(row0.query, q_len - 1) * self.query_step;
        let from1 = self.base + min(row1.query, q_len - 1) * self.query_step;
        let own = first + UNIT_POS_X as usize % 4 * 2;
        let mut z = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for n in 0..comptime!(keys / 8) {
            #[unroll]
            for e in 0..2usize {
                let key = min(own + comptime!(n * 8 + e), k_len - 1) * self.key_step;
                z.insert(comptime!(n * 4 + e), scores[from0 + key]);
                z.insert(comptime!(n * 4 + 2 + e), scores[from1 + key]);
            }
        }
        z
    }

    /// The logits of an accumulator (see [`tile_logits`](crate::matrix::logits::tile_logits)), whose first column is
    /// key `first`, with the biases of [`tile`](Self::tile).
    pub(crate) fn add<N: Size>(
        &self,
        logits: &Vector<f32, N>,
        scores: &Tensor<f32>,
        own: &CubeTile,
        rows: &RowPair,
        first: usize,
    ) -> Vector<f32, N> {
        let (q_len, k_len) = (own.q_len, own.k_len);
        let keys = comptime!(own.bp.key_tile);
        // All of them are loaded before the first is needed, so that the loads overlap.
        let z = self.tile::<N>(scores, &rows.upper, &rows.lower, first, q_len, k_len, keys);
        let mut sums = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for n in 0..comptime!(keys / 2) {
            sums.insert(n, logits.extract(n) + z.extract(n));
        }
        sums
    }
}

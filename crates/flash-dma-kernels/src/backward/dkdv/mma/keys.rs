//! The keys whose rows a lane of an `mma` warp holds, and the step from their products to logits.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::KeyTileSource;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::score_row;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::Pairs;
use crate::dropout::{DropoutArg, copied};
use crate::matrix::fragment::quad_sum;
use crate::matrix::logit_scale::LogitScale;
use cubecl::prelude::*;

/// A logit, and its scaled and capped product, which is not used without a softcap.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct CappedLogit {
    pub logit: f32,
    pub capped: f32,
}

/// Two keys of every fragment of the warp.
#[derive(CubeType)]
pub(crate) struct LaneKeys {
    logit_scale: LogitScale,
    /// The keys' scores; with `bp.pattern.has_head_bias()` their biases for one query head.
    scores: Array<f32>,
    /// The first key of the cube if keys come in order, and the number of keys.
    start: usize,
    pub count: usize,
    /// Offset of the gradients of the biases of the group's first head.
    bias_row: usize,
    pub dropout: DropoutArg,
    #[cube(comptime)]
    pub bp: DkdvBlueprint,
}

/// The index in the tile of this lane's key among the `n`-th eight rows of its warp's fragments.
#[cube]
pub(crate) fn local_key(#[comptime] n: usize, #[comptime] bp: DkdvBlueprint) -> usize {
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys()) + comptime!(n * 8) + lane / 4
}

#[cube]
impl LaneKeys {
    /// The keys of this lane, with the scores that all heads of the group share or 0.
    pub(crate) fn new(source: &KeyTileSource, place: &ChunkTile, pairs: &Pairs) -> LaneKeys {
        let (scale, bp) = (&pairs.logit_scale, comptime!(pairs.bp));
        let first_head = place.batch * place.sizes.q_heads + pairs.rows.head;
        let bias_row = first_head * place.sizes.k_len;
        let mut scores = Array::<f32>::new(comptime!(bp.fragments * 2));
        let score_row = score_row(source, place, bp);
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let local = local_key(n, bp);
            scores[n] = 0.0f32;
            if comptime!(bp.pattern.has_shared_score()) && place.start + local < place.count {
                scores[n] =
                    source.bias.as_ref().unwrap()[score_row + place.key_of(source, local, bp)];
            }
        }
        LaneKeys {
            logit_scale: scale.copied(),
            scores,
            start: place.start,
            count: place.count,
            bias_row,
            dropout: copied(&pairs.dropout),
            bp,
        }
    }

    pub(crate) fn load_biases(&self, mask: &KeyMask, head: usize) {
        let bp = comptime!(self.bp);
        let mut scores = self.scores;
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let key = self.start + local_key(n, bp);
            if key < self.count {
                scores[n] = mask.bias(head, 0usize, key - mask.first);
            }
        }
    }

    /// [`load_biases`](Self::load_biases) for the second role, which turns capped products into logits.
    pub(crate) fn load_biases_of_capped(&self, mask: &KeyMask, head: usize) {
        if comptime!(self.bp.softcap) {
            self.load_biases(mask, head);
        }
    }

    /// Adds `sums` to the gradients of the biases for head `head`, to which no other cube adds, and resets the sums.
    pub(crate) fn add_bias_gradients(
        &self,
        sums: &mut Array<f32>,
        grad: &mut ComptimeOption<Box<[f32]>>,
        head: usize,
    ) {
        let bp = comptime!(self.bp);
        let grad = grad.as_mut().unwrap();
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let sum = quad_sum(sums[n]);
            sums[n] = 0.0f32;
            let key = self.start + local_key(n, bp);
            let quad = UNIT_POS_X % 4;
            if quad == 0 && key < self.count {
                grad[self.bias_row + head * self.count + key] += sum;
            }
        }
    }

    /// The score of the key of the `n`-th eight rows; 0 without.
    pub(crate) fn score(&self, #[comptime] n: usize) -> f32 {
        if comptime!(self.bp.pattern.has_intervals() || self.bp.pattern.has_key_bias()) {
            self.scores[n]
        } else {
            f32::new(0.0)
        }
    }

    /// The logit of a product with a key of score `z`, and with a softcap the capped product, from which the second
    /// role computes the logit again by the same sum.
    pub(crate) fn logit_of(&self, product: f32, z: f32) -> CappedLogit {
        if comptime!(self.bp.softcap) {
            let capped = (self.logit_scale).apply(product, 0.0f32);
            CappedLogit {
                logit: capped + z,
                capped,
            }
        } else {
            let logit = (self.logit_scale).apply(product, z);
            CappedLogit {
                logit,
                capped: product,
            }
        }
    }

    pub(crate) fn logit(&self, product: f32, z: f32) -> f32 {
        self.logit_of(product, z).logit
    }

    /// The slope of a [capped](Self::logit_of) product, see [`LogitScale::slope`].
    pub(crate) fn slope(&self, capped: f32) -> f32 {
        (self.logit_scale).slope(capped)
    }
}

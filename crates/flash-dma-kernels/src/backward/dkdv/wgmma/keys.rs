//! The two keys whose rows a lane of a warpgroup holds.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::alibi::key_place;
use crate::backward::dkdv::shared::args::KeyTileSource;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::{OwnKey, own_key, score_row};
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::dropout::{DropoutArg, DropoutSeed, column_word};
use crate::matrix::dropout::PairMask;
use crate::matrix::ptx::{read_pair, shared_address};
use cubecl::prelude::*;

/// Rows `lane / 4` and `lane / 4 + 8` of the warp's sixteen.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneKeys {
    pub upper: OwnKey,
    pub lower: OwnKey,
    /// The keys' places for ALiBi.
    pub upper_place: f32,
    pub lower_place: f32,
    /// The keys' words of the dropout mask.
    mask: ComptimeOption<KeyWords>,
    #[cube(comptime)]
    pub bp: DkdvBlueprint,
}

#[derive(CubeType, Clone, Copy)]
struct KeyWords {
    upper: u32,
    lower: u32,
    seed: DropoutSeed,
}

#[cube]
fn key_words(dropout: &DropoutArg, upper: &OwnKey, lower: &OwnKey) -> ComptimeOption<KeyWords> {
    #[comptime]
    match dropout {
        ComptimeOption::Some(seed) => ComptimeOption::new_Some(KeyWords {
            upper: column_word(upper.key, seed),
            lower: column_word(lower.key, seed),
            seed: seed.copied(),
        }),
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

#[cube]
impl LaneKeys {
    /// The keys with the scores that all heads of the group share.
    pub(crate) fn new(
        source: &KeyTileSource,
        place: &ChunkTile,
        dropout: &DropoutArg,
        #[comptime] bp: DkdvBlueprint,
    ) -> LaneKeys {
        let score_row = score_row(source, place, bp);
        let local = UNIT_POS_Y as usize * 16 + UNIT_POS_X as usize / 4;
        let scored = comptime!(bp.pattern.has_shared_score());
        let upper = own_key(local, place, source, score_row, scored, bp);
        let lower = own_key(local + 8, place, source, score_row, scored, bp);
        let mask = key_words(dropout, &upper, &lower);
        let (q_len, k_len) = (place.sizes.q_len, place.sizes.k_len);
        let upper_place = key_place(upper.key, q_len, k_len, bp);
        let lower_place = key_place(lower.key, q_len, k_len, bp);
        LaneKeys {
            upper,
            lower,
            upper_place,
            lower_place,
            mask,
            bp,
        }
    }

    /// The dropout mask of the keys and of rows `8 n + 2 quad` and the next of `stage`; `words` are of all stages.
    pub(crate) fn pair_mask(
        &self,
        words: &ComptimeOption<Shared<[u32]>>,
        stage: usize,
        #[comptime] n: usize,
    ) -> ComptimeOption<PairMask> {
        #[comptime]
        match &self.mask {
            ComptimeOption::Some(mask) => {
                let words = words.as_ref().unwrap();
                let row = stage * comptime!(self.bp.rows)
                    + comptime!(n * 8)
                    + UNIT_POS_X as usize % 4 * 2;
                ComptimeOption::new_Some(PairMask {
                    upper: mask.upper,
                    lower: mask.lower,
                    columns: read_pair(shared_address(&words[0..1]) + row as u32 * 4),
                    seed: mask.seed.copied(),
                })
            }
            ComptimeOption::None => ComptimeOption::new_None(),
        }
    }

    pub(crate) fn load_biases(&mut self, mask: &KeyMask, head: usize) {
        self.upper.bias(mask, head);
        self.lower.bias(mask, head);
    }
}

//! How the stages of a ring are filled with keys: gathered by all units, or as boxes by one.

use super::blueprint::MmaBlueprint;
use super::rows::TileKeys;
use super::stream::{KeyCopies, Stages};
use crate::tile::wgmma::{Panels, Ring, copy_boxes, map_address};
use cubecl::prelude::*;

/// The copies of a cube's key tiles as boxes; without lists.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct KeyBoxes {
    /// Where the tensor maps lie.
    k: u64,
    v: u64,
    /// The first stage of each, as of [`Panels`].
    k_panels: u32,
    v_panels: u32,
    batch: usize,
    head: usize,
    /// The key of slot 0.
    begin: usize,
}

#[cube]
impl KeyBoxes {
    pub(crate) fn new<E: Float>(
        k: &ComptimeOption<TensorMap<E, Tiled>>,
        v: &ComptimeOption<TensorMap<E, Tiled>>,
        stages: &Stages<E>,
        batch: usize,
        head: usize,
        keys: &TileKeys,
    ) -> KeyBoxes {
        KeyBoxes {
            k: map_address::<E>(k),
            v: map_address::<E>(v),
            k_panels: Panels::at::<E>(&stages.k[0..1]).address,
            v_panels: Panels::at::<E>(&stages.v[0..1]).address,
            batch,
            head,
            begin: keys.begin,
        }
    }

    /// Starts the copies of tile `tile` into its stage. One unit calls it.
    fn start(&self, ring: &Ring, tile: usize, #[comptime] bp: MmaBlueprint) {
        let stage = tile % comptime!(bp.stages);
        let begin = stage as u32 * comptime!((bp.key_tile * bp.chunks()) as u32);
        let row = self.begin + tile * comptime!(bp.key_tile);
        ring.arrive_expecting(stage, comptime!(bp.tile_bytes()));
        let to = Panels {
            address: self.k_panels + begin,
        };
        let (rows, columns) = comptime!((bp.key_tile, bp.head_dim));
        copy_boxes(
            self.k, self.batch, self.head, row, &to, ring, stage, rows, columns,
        );
        let to = Panels {
            address: self.v_panels + begin,
        };
        copy_boxes(
            self.v, self.batch, self.head, row, &to, ring, stage, rows, columns,
        );
    }
}

/// Starts the copies of tile `tile`, which has keys, as soon as its stage is empty; tiles come in order. All units call
/// it.
#[cube]
pub(crate) fn fill_stage<E: Float>(
    copies: &mut KeyCopies,
    boxes: &KeyBoxes,
    ring: &Ring,
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    score_row: usize,
    interval_row: usize,
    keys: &TileKeys,
    tile: usize,
    stages: &mut Stages<E>,
    #[comptime] bp: MmaBlueprint,
) {
    let stage = tile % comptime!(bp.stages);
    // How often the stage has been filled before.
    let turn = tile / comptime!(bp.stages);
    if comptime!(bp.boxes) {
        if UNIT_POS == 0 {
            if turn > 0 {
                ring.wait_empty(stage, turn - 1);
            }
            boxes.start(ring, tile, bp);
        }
    } else {
        if turn > 0 {
            ring.wait_empty(stage, turn - 1);
        }
        copies.start::<E>(
            scores,
            intervals,
            score_row,
            interval_row,
            keys,
            tile,
            stages,
            bp,
        );
        ring.arrive_copied(stage);
    }
}

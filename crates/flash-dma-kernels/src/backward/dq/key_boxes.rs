//! Key tiles of dense attention as boxes: one unit issues all copies.

use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::boxes::{copy_boxes, map_address};
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::ring::Ring;
use cubecl::prelude::*;

/// The copies of a cube's key tiles.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct KeyBoxes {
    /// Addresses of the tensor maps.
    k: u64,
    v: u64,
    /// Addresses of the first stages, in units of [`Panels`].
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

    /// Starts the copies of tile `tile` as soon as its stage is empty. Only one unit calls it.
    pub(crate) fn fill(&self, ring: &Ring, tile: usize, #[comptime] bp: MmaBlueprint) {
        let stage = tile % comptime!(bp.stages);
        // The number of earlier fills of the stage.
        let turn = tile / comptime!(bp.stages);
        if turn > 0 {
            ring.wait_empty(stage, turn - 1);
        }
        let begin = stage as u32 * comptime!((bp.key_tile * bp.chunks()) as u32);
        let row = self.begin + tile * comptime!(bp.key_tile);
        ring.arrive_expecting(stage, comptime!((4 * bp.key_tile * bp.head_dim) as u32));
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

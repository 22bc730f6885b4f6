//! Key tiles of dense attention as boxes: one unit issues all copies.

use crate::matrix::args::KeySource;
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::stages::Stages;
use crate::matrix::wgmma::boxes::{BoxPlace, boxes_of, copy_boxes, map_address, takes_boxes};
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::ring::Ring;
use cubecl::prelude::*;

/// The tensor maps of K and V, if their rows are copied as boxes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyMaps<E: Float> {
    pub k: ComptimeOption<TensorMap<E, Tiled>>,
    pub v: ComptimeOption<TensorMap<E, Tiled>>,
    /// True if there are maps: CubeCL's stable hash, the key of its disk cache, does not tell an absent map from a
    /// present one.
    #[cube(comptime)]
    pub exist: bool,
}

impl<E: Float> KeyMapsLaunch<E> {
    /// The tensor maps of K and V for the key tiles of a blueprint, if its keys are contiguous and nothing else is
    /// noted of them.
    pub(crate) fn of(bp: &MmaBlueprint, [_, k, v]: [&TensorBinding; 3]) -> Self {
        let pattern = bp.pattern;
        let gathers = pattern.has_intervals() || pattern.is_planned() || pattern.has_key_bias();
        let takes = |rows| takes_boxes(rows, bp.element.size());
        let exist = !gathers && !bp.notes_columns() && takes(k) && takes(v);
        let [k, v] = [k, v].map(|rows| {
            let map = exist.then(|| boxes_of(rows, bp.element, 1, bp.key_tile));
            map.into()
        });
        Self::new(k, v, exist)
    }
}

/// The copies of a cube's key tiles as boxes.
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
    /// The key of column 0.
    begin: usize,
    /// The unit that copies.
    #[cube(comptime)]
    unit: u32,
    /// True if there are tensor maps.
    #[cube(comptime)]
    exist: bool,
}

#[cube]
impl KeyBoxes {
    pub(crate) fn new<E: Float>(
        maps: &KeyMaps<E>,
        stages: &Stages<E>,
        attended: &AttendedKeys,
        #[comptime] unit: u32,
    ) -> KeyBoxes {
        KeyBoxes {
            k: map_address::<E>(&maps.k),
            v: map_address::<E>(&maps.v),
            k_panels: Panels::at::<E>(&stages.k[0..1]).address,
            v_panels: Panels::at::<E>(&stages.v[0..1]).address,
            batch: attended.own.batch,
            head: attended.own.kv_head,
            begin: attended.keys.begin,
            unit,
            exist: maps.exist,
        }
    }

    /// Starts this unit's part of the copies of tile `tile` as soon as its stage is empty: one unit copies boxes
    /// for all or, without them, every unit gathers.
    pub(crate) fn fill_or_gather<E: Float>(
        &self,
        copies: &mut KeyCopies,
        ring: &Ring,
        source: &KeySource,
        attended: &AttendedKeys,
        tile: usize,
        stages: &mut Stages<E>,
    ) {
        if comptime!(self.exist) {
            if UNIT_POS == comptime!(self.unit) {
                self.fill(ring, tile, attended.own.bp);
            }
        } else {
            copies.fill::<E>(ring, source, attended, tile, stages);
        }
    }

    /// Starts the copies of tile `tile` as soon as its stage is empty. Only one unit calls it.
    fn fill(&self, ring: &Ring, tile: usize, #[comptime] bp: MmaBlueprint) {
        let stage = tile % comptime!(bp.stages);
        // Number of earlier fills of the stage.
        let turn = tile / comptime!(bp.stages);
        if turn > 0 {
            ring.wait_empty(stage, turn - 1);
        }
        let begin = stage as u32 * comptime!((bp.key_tile * bp.segments()) as u32);
        let row = self.begin + tile * comptime!(bp.key_tile);
        ring.arrive_expecting(stage, comptime!((4 * bp.key_tile * bp.head_dim) as u32));
        let (batch, head) = (self.batch, self.head);
        let (rows, columns) = comptime!((bp.key_tile, bp.head_dim));
        let address = self.k_panels + begin;
        let to = Panels { address };
        let from = BoxPlace { batch, head, row };
        copy_boxes(self.k, &from, &to, ring, stage, rows, columns);
        let address = self.v_panels + begin;
        let to = Panels { address };
        copy_boxes(self.v, &from, &to, ring, stage, rows, columns);
    }
}

//! Writes the gradients of a cube's keys.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyTileSource};
use crate::backward::dkdv::shared::keys::{ChunkTile, own_key, score_row};
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::QueryRows;
use crate::backward::dkdv::shared::sums::add_pair;
use crate::backward::repair::repair_key;
use crate::matrix::fragment::quad_sum;
use crate::matrix::logits::LogitScale;
use crate::matrix::stages::RowAddress;
use cubecl::prelude::*;

/// The keys of a cube whose biases differ per query head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasKeys {
    /// The first key, and the number of keys.
    pub start: usize,
    pub count: usize,
    /// Offset of the gradients of the biases of the group's first head.
    pub row: usize,
}

/// The slot of the key that this lane holds of the `n`-th eight rows of its warp's fragments.
#[cube]
pub(crate) fn slot_of(#[comptime] n: usize, #[comptime] bp: DkdvBlueprint) -> usize {
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys()) + comptime!(n * 8) + lane / 4
}

#[cube]
impl BiasKeys {
    /// Sets `biases` to the biases for head `head` of the group.
    pub(crate) fn load(
        &self,
        biases: &mut Array<f32>,
        mask: &KeyMask,
        head: usize,
        #[comptime] bp: DkdvBlueprint,
    ) {
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let key = self.start + slot_of(n, bp);
            if key < self.count {
                biases[n] = mask.bias(head, 0usize, key - mask.first);
            }
        }
    }

    /// Adds `sums` to the gradients for head `head`, to which no other cube adds, and resets the sums.
    pub(crate) fn add(
        &self,
        sums: &mut Array<f32>,
        grad: &mut [f32],
        head: usize,
        #[comptime] bp: DkdvBlueprint,
    ) {
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let sum = quad_sum(sums[n]);
            sums[n] = 0.0f32;
            let key = self.start + slot_of(n, bp);
            let quad = UNIT_POS_X % 4;
            if quad == 0 && key < self.count {
                grad[self.row + head * self.count + key] += sum;
            }
        }
    }
}

/// The index of the key in slot `slot` of the tile that begins at key `start` of the list's row, which is
/// at `list_row`.
#[cube]
pub(crate) fn key_of(
    list: &[u32],
    list_row: usize,
    start: usize,
    slot: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let mut key = start + slot;
    if comptime!(bp.pattern.has_intervals()) {
        key = list[list_row + slot] as usize;
    }
    key
}

/// The row of the gradients of the key in slot `slot`; `first_row` is that of the head's first key.
#[cube]
pub(crate) fn row_of(
    list: &[u32],
    list_row: usize,
    start: usize,
    slot: usize,
    first_row: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let mut row = list_row + slot;
    if comptime!(!bp.parts) {
        row = first_row + key_of(list, list_row, start, slot, bp);
    }
    row
}

/// Writes or adds `factor` times the accumulated rows of this warp's first `left` keys.
#[cube]
pub(crate) fn write_rows<O: Float, NO: Size>(
    list: &[u32],
    list_row: usize,
    start: usize,
    acc: &Array<Vector<f32, NO>>,
    grad: &mut [Vector<O, Const<2>>],
    factor: f32,
    first_row: usize,
    left: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    let (lane, warp) = (
        UNIT_POS_X as usize,
        UNIT_POS_Y as usize % comptime!(bp.role_warps),
    );
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        #[unroll]
        for lower in 0..2usize {
            let slot = warp * comptime!(bp.warp_keys()) + comptime!(m * 16 + lower * 8) + lane / 4;
            if slot < left {
                let row =
                    row_of(list, list_row, start, slot, first_row, bp) * comptime!(bp.head_dim / 2);
                #[unroll]
                for c in 0..comptime!(bp.chunks()) {
                    let at = row + comptime!(c * 4) + lane % 4;
                    let (index, first) = comptime!(bp.sums().place(m, c));
                    let x = acc[index].extract(comptime!(first + lower * 2)) * factor;
                    let y = acc[index].extract(comptime!(first + lower * 2 + 1)) * factor;
                    if comptime!(bp.shared_keys) {
                        add_pair::<O>(&mut grad[at..at + 1], x, y);
                    } else {
                        let mut pair = Vector::<f32, Const<2>>::new(x);
                        pair.insert(1usize, y);
                        grad[at] = Vector::cast_from(pair);
                    }
                }
            }
        }
    }
}

/// Adds the contributions of broken steps' rows to the gradients of this warp's keys, once they are written: to dV in
/// the first role, to dK in the second.
#[cube]
pub(crate) fn repair_keys<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    place: &ChunkTile,
    rows: &QueryRows,
    mask: &KeyMask,
    logit_scale: &LogitScale,
    grad: &mut [Vector<O, Const<2>>],
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let score_row = score_row(&source.scores, place.batch, place.kv_head, bp);
    for n in 0..comptime!(bp.fragments * 2) {
        let slot = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + n * 8
            + UNIT_POS_X as usize / 4;
        let own = own_key(
            slot,
            place,
            source,
            score_row,
            comptime!(bp.pattern.has_shared_score()),
            bp,
        );
        repair_key::<E, O>(
            inputs,
            &own,
            &k_rows,
            rows,
            mask,
            logit_scale,
            grad,
            first_role,
            bp,
        );
    }
}

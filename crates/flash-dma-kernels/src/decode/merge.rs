//! Merges the outputs of the parts of the keys.

use crate::decode::tensors::MergedParts;
use crate::finite::negative_infinity;
use cubecl::prelude::*;

/// Parts that a unit reads at once.
const READS: usize = 4;

/// Writes row `row` of `out` and its `lse`, which this cube owns:
///
/// `lse = log sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`, the sums in an order that depends only on the
/// number of parts. Unlike in the forward pass there are few rows and maybe a thousand parts, so units share them.
#[cube]
pub(crate) fn merge_row<E: Float>(
    merged: &mut MergedParts<E>,
    parts: usize,
    rows: usize,
    row: usize,
    #[comptime] pairs: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let none = negative_infinity();
    let mut shared = Shared::<[f32]>::new_slice(units);

    let mut greatest = none;
    let mut part = unit;
    while part < parts {
        greatest = max(greatest, merged.part_lse[part * rows + row]);
        part += units;
    }
    shared[unit] = greatest;
    sync_cube();
    let mut half = usize::new(comptime!(units as i64 / 2));
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    greatest = shared[0];
    // All values are -inf or NaN: any finite reference works.
    let reference = select(greatest == none, 0.0f32, greatest);

    // Groups of units process the parts round-robin; a unit of a group owns a pair of columns, or several.
    let groups = comptime!((units / pairs).max(1));
    let mut sums = Shared::<[f32]>::new_slice(groups);
    let mut values = Shared::<[Vector<f32, Const<2>>]>::new_slice(comptime!(groups * pairs));
    let mut item = unit;
    while item < comptime!(groups * pairs) {
        let (group, column) = (item / pairs, item % pairs);
        let mut sum = 0.0f32;
        let mut value = Vector::<f32, Const<2>>::new(0.0f32);
        let mut part = group;
        while part < parts {
            // Several parts are read before the first one is used, so that the reads overlap.
            let mut lses = Array::<f32>::new(READS);
            let mut rests = Array::<f32>::new(READS);
            let mut outs = Array::<Vector<f32, Const<2>>>::new(READS);
            #[unroll]
            for r in 0..READS {
                let at = min(part + comptime!(r * groups), parts - 1) * rows + row;
                lses[r] = merged.part_lse[at];
                rests[r] = merged.part_rest[at];
                outs[r] = merged.part_out[at * pairs + column];
            }
            #[unroll]
            for r in 0..READS {
                let there = part + comptime!(r * groups) < parts;
                let weight = select(there, ((lses[r] - reference) + rests[r]).exp(), 0.0f32);
                let term = Vector::new(weight) * outs[r];
                sum += weight;
                value += select(there, term, Vector::new(0.0f32));
            }
            part += comptime!(READS * groups);
        }
        values[item] = value;
        if column == 0 {
            sums[group] = sum;
        }
        item += units;
    }
    sync_cube();
    let mut column = unit;
    while column < pairs {
        let mut sum = 0.0f32;
        let mut value = Vector::<f32, Const<2>>::new(0.0f32);
        for group in 0..groups {
            sum += sums[group];
            value += values[group * pairs + column];
        }
        // No key in any part: zeros and an LSE of -inf. NaN stays NaN.
        let empty = sum == 0.0f32;
        let mut result = Vector::<f32, Const<2>>::new(0.0f32);
        if !empty {
            result = value / Vector::new(sum);
        }
        merged.out[row * pairs + column] = Vector::cast_from(result);
        if column == 0 {
            merged.lse[row] = select(empty, none, reference + sum.ln());
        }
        column += units;
    }
}

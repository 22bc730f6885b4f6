//! The keys of a step that only some of its rows attend to: the new tokens, and the slots that they take.

use crate::decode::commit::{ENTRY, NONE};
use crate::decode::mma::blueprint::{DecodeMmaBlueprint, ROWS, SEGMENT};
use crate::decode::mma::rows::{StepRow, out_row, q_at};
use crate::decode::mma::stream::Held;
use crate::decode::tensors::{StepTensors, row_at};
use crate::math::log_sum_rest;
use crate::matrix::logit_scale::{LogitScale, rescale_to};
use crate::matrix::ptx::shuffle_xor;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// Part 0 of the keys: each new token, from its own query on until a later token takes its slot, and the key that was
/// in a slot before a token took it. Only selected pairs are computed; nothing is masked by multiplication.
///
/// `2 * warps` neighbouring units own a row, each unit some of its segments.
#[cube]
pub(crate) fn attend_newcomers<E: Float>(
    q: &Tensor<Vector<E, Const<2>>>,
    tensors: &StepTensors<E, Const<8>>,
    held: &Held,
    logit_scale: &LogitScale,
    out: &mut [Vector<f32, Const<2>>],
    lse: &mut [f32],
    lse_rest: &mut [f32],
    #[comptime] bp: DecodeMmaBlueprint,
) {
    let lanes = comptime!(2 * bp.warps);
    let segments = comptime!(bp.segments());
    let own_segments = comptime!(bp.segments().div_ceil(2 * bp.warps));
    let unit = (UNIT_POS_Y * 32 + UNIT_POS_X) as usize;
    let lane = unit % lanes;
    let row = StepRow::new(unit / lanes, held);
    let query = row.token;

    let mut q_row = Array::<f32>::new(comptime!(own_segments * SEGMENT));
    let mut acc = Array::<f32>::new(comptime!(own_segments * SEGMENT));
    let q_first = q_at::<E>(q, held, &row);
    #[unroll]
    for c in 0..own_segments {
        let segment = lane + comptime!(c * lanes);
        #[unroll]
        for pair in 0..comptime!(SEGMENT / 2) {
            let mut values = Vector::<E, Const<2>>::new(E::from_int(0));
            if segment < segments {
                values = q[q_first + segment * comptime!(SEGMENT / 2) + pair];
            }
            #[unroll]
            for e in 0..2usize {
                let at = comptime!(c * SEGMENT + pair * 2 + e);
                q_row[at] = f32::cast_from(values.extract(e));
                acc[at] = 0.0f32;
            }
        }
    }

    let none = f32::new(f32::NEG_INFINITY);
    let mut greatest = none;
    let mut sum = 0.0f32;
    // The new tokens and, with slots, the keys that they evict.
    let mut keys = held.tokens;
    if comptime!(!bp.paged) {
        keys += held.tokens;
    }
    for n in 0..keys {
        let is_new = n < held.tokens;
        let token = select(is_new, n, n - min(n, held.tokens));
        let mut first = token;
        let mut end = held.tokens;
        let mut slot = i32::new(0);
        let mut z = 0.0f32;
        if comptime!(bp.scored) && is_new {
            let new = &tensors.scores.as_ref().unwrap().new;
            z = new[held.batch * new.stride(0) + held.head * new.stride(1) + token];
        }
        if comptime!(!bp.paged) {
            let moves = tensors.moves.as_ref().unwrap();
            slot = moves[held.first_place + token * ENTRY];
            if is_new {
                for other in token + 1..held.tokens {
                    if end == held.tokens && moves[held.first_place + other * ENTRY] == slot {
                        end = other;
                    }
                }
            } else {
                // The first token that takes a slot evicts the key that the cache held.
                first = 0;
                end = token;
                for other in 0..token {
                    if moves[held.first_place + other * ENTRY] == slot {
                        end = 0;
                    }
                }
                if slot != comptime!(NONE) {
                    z = tensors.scores.as_ref().unwrap().cached[held.slot_row(slot as usize)];
                }
            }
            if slot == comptime!(NONE) {
                end = first;
            }
        }
        if z == none {
            end = first;
        }
        if comptime!(bp.only_ranked) {
            z = 0.0f32;
        }
        if first < end {
            let mut from_k = row_at(&tensors.new_k, held.batch, held.head, token) / SEGMENT;
            let mut from_v = row_at(&tensors.new_v, held.batch, held.head, token) / SEGMENT;
            if !is_new {
                from_k = held.slot_row(slot as usize) * segments;
                from_v = from_k;
            }
            let mut dot = 0.0f32;
            let mut values = Array::<f32>::new(comptime!(own_segments * SEGMENT));
            #[unroll]
            for c in 0..own_segments {
                let segment = min(lane + comptime!(c * lanes), comptime!(segments - 1));
                let key = segment_of::<E>(&tensors.k, &tensors.new_k, from_k + segment, is_new);
                let value = segment_of::<E>(&tensors.v, &tensors.new_v, from_v + segment, is_new);
                let mut part = 0.0f32;
                #[unroll]
                for e in 0..SEGMENT {
                    let at = comptime!(c * SEGMENT + e);
                    part += q_row[at] * f32::cast_from(key.extract(e));
                    values[at] = f32::cast_from(value.extract(e));
                }
                dot += select(lane + comptime!(c * lanes) < segments, part, 0.0f32);
            }
            #[unroll]
            for step in 0..comptime!(lanes.ilog2()) {
                dot += shuffle_xor(dot, comptime!(1u32 << step));
            }
            let sees = first <= query && query < end;
            let x = select(sees, logit_scale.apply(dot, z), none);
            let new = max(greatest, x);
            let rescale = rescale_to(greatest, new);
            let p = select(sees, rescale_to(x, new), 0.0f32);
            greatest = new;
            sum = sum * rescale + p;
            #[unroll]
            for at in 0..comptime!(own_segments * SEGMENT) {
                let term = select(sees, p * values[at], 0.0f32);
                acc[at] = acc[at] * rescale + term;
            }
        }
    }

    let empty = sum == 0.0f32;
    let inverse = select(empty, 0.0f32, 1.0f32 / sum);
    let to = out_row::<E>(q, held, &row, 0usize);
    if row.valid {
        #[unroll]
        for c in 0..own_segments {
            let segment = lane + comptime!(c * lanes);
            if segment < segments {
                #[unroll]
                for pair in 0..comptime!(SEGMENT / 2) {
                    let mut result = Vector::<f32, Const<2>>::new(0.0f32);
                    #[unroll]
                    for e in 0..2usize {
                        let x = acc[comptime!(c * SEGMENT + pair * 2 + e)] * inverse;
                        result.insert(e, select(empty, 0.0f32, x));
                    }
                    out[(to * segments + segment) * comptime!(SEGMENT / 2) + pair] = result;
                }
            }
        }
        if lane == 0 {
            let row_lse = select(empty, none, greatest + sum.ln());
            lse[to] = row_lse;
            lse_rest[to] = log_sum_rest(greatest, sum.ln(), row_lse);
        }
    }
}

/// A segment of a new row, or of one of the cache.
#[cube]
fn segment_of<E: Float>(
    cached: &Tensor<Segment<E>>,
    new: &Tensor<Segment<E>>,
    at: usize,
    is_new: bool,
) -> Segment<E> {
    if is_new { new[at] } else { cached[at] }
}

const _: () = assert!(ROWS == 16, "2 * warps units of 32 * warps own a row");

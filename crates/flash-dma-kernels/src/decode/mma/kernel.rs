//! The tensor-core kernel of a decode step.

use crate::args::Scaling;
use crate::decode::mma::blueprint::DecodeMmaBlueprint;
use crate::decode::mma::newcomers::attend_newcomers;
use crate::decode::mma::rows::{StepRow, out_row, q_at};
use crate::decode::mma::stream::{Held, NextTile, WarpStages, start_copies};
use crate::decode::tensors::StepTensors;
use crate::matrix::logit_scale::LogitScale;
use crate::matrix::mma::{LanePlace, multiply};
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::rows::OutputRows;
use crate::matrix::softmax::{Columns, OnlineSoftmax, packed};
use cubecl::prelude::*;

/// Attention over the keys of kv head `CUBE_POS_X`, counted over all sequences, of the 16 query rows `CUBE_POS_Z`. The
/// cubes `CUBE_POS_Y = 0` own the newcomers; in the other cubes every warp owns a part of the keys that the cache held
/// before the step, and writes the output and LSE of its rows over that part. Part 0 is the newcomers'.
///
/// | buffer | layout |
/// |---|---|
/// | `q` | `[batch, q_heads, tokens, head_dim]`, strides at multiples of 2 elements |
/// | `out` | contiguous `[parts, batch, q_heads, tokens, head_dim]`, overwritten |
/// | `lse`, `lse_rest` | contiguous `[parts, batch, q_heads, tokens]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn decode_mma_kernel<E: Float>(
    q: &Tensor<Vector<E, Const<2>>>,
    tensors: &StepTensors<E, Const<8>>,
    out: &mut [Vector<f32, Const<2>>],
    lse: &mut [f32],
    lse_rest: &mut [f32],
    scaling: &Scaling,
    #[comptime] bp: DecodeMmaBlueprint,
    #[define(E)] _element: ElemType,
) {
    let held = Held::of_cube::<E>(q, tensors);
    let logit_scale = LogitScale::new(scaling, comptime!(bp.logit_form()));
    if CUBE_POS_Y == 0 {
        attend_newcomers::<E>(q, tensors, &held, &logit_scale, out, lse, lse_rest, bp);
    } else {
        attend_held::<E>(q, tensors, &held, &logit_scale, out, lse, lse_rest, bp);
    }
}

/// Attention over this warp's part of the keys that all rows attend to.
#[cube]
fn attend_held<E: Float>(
    q: &Tensor<Vector<E, Const<2>>>,
    tensors: &StepTensors<E, Const<8>>,
    held: &Held,
    logit_scale: &LogitScale,
    out: &mut [Vector<f32, Const<2>>],
    lse: &mut [f32],
    lse_rest: &mut [f32],
    #[comptime] bp: DecodeMmaBlueprint,
) {
    let key_tile = comptime!(bp.key_tile);
    let lane = UNIT_POS_X as usize;
    let quad = lane % 4;
    let parts = (CUBE_COUNT_Y as usize - 1) * comptime!(bp.warps);
    let part = (CUBE_POS_Y as usize - 1) * comptime!(bp.warps) + UNIT_POS_Y as usize;
    let first_tile = held.tiles_of(part, parts, bp);
    let tiles = held.tiles_of(part + 1, parts, bp) - first_tile;

    let mut stages = WarpStages::<E>::new(bp);
    let mut next = NextTile::new::<E>(held, tensors);
    next.read::<E>(tensors, held, first_tile, bp);

    let size!(NA) = 4usize;
    let size!(NS) = comptime!(bp.key_tile / 2);
    let size!(NO) = 16usize;
    let row0 = StepRow::new(lane / 4, held);
    let row1 = StepRow::new(lane / 4 + 8, held);
    let at0 = q_at::<E>(q, held, &row0) + quad;
    let at1 = q_at::<E>(q, held, &row1) + quad;
    let mut q_rows = Sequence::<Vector<u32, NA>>::new();
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 16) {
        let mut a = Vector::<u32, NA>::new(0u32);
        #[unroll]
        for half in 0..2usize {
            let upper = u32::reinterpret(q[at0 + comptime!(c * 8 + half * 4)]);
            let lower = u32::reinterpret(q[at1 + comptime!(c * 8 + half * 4)]);
            a.insert(comptime!(half * 2), select(row0.valid, upper, 0u32));
            a.insert(comptime!(half * 2 + 1), select(row1.valid, lower, 0u32));
        }
        q_rows.push(a);
    }

    let by_columns = LanePlace::columns(comptime!(bp.segments()));
    let by_rows = LanePlace::rows(comptime!(bp.segments()));
    let row_bytes = comptime!(2 * bp.head_dim as u32);
    let mut acc = Array::<Vector<f32, NO>>::new(comptime!(bp.head_dim / 32));
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 32) {
        acc[c] = Vector::new(0.0f32);
    }
    let none = f32::new(f32::NEG_INFINITY);
    let mut softmax = OnlineSoftmax::new(false);

    // Copies run `stages - 1` iterations ahead of the products. Every iteration commits one group of copies, an empty
    // one past the end, so that the number of groups in flight tells which tile has landed.
    let ahead = comptime!(bp.stages - 1);
    for turn in 0..tiles + ahead {
        if turn >= ahead {
            // This lane's part of the tile has landed; after the barrier, every lane's has, and every lane is done with
            // the stage that is filled next.
            wait_copies(comptime!(bp.stages as u32 - 2));
            sync_plane();
        }
        if turn < tiles {
            let stage = turn % comptime!(bp.stages);
            let tile = first_tile + turn;
            start_copies::<E>(tensors, held, &next, tile, stage, &mut stages, bp);
            next.read::<E>(tensors, held, first_tile + turn + 1, bp);
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            let stage = tile % comptime!(bp.stages);
            let k_keys = stages.k_address(stage, bp);
            let v_keys = stages.v_address(stage, bp);

            // S = Q K^T.
            let mut s = Vector::<f32, NS>::new(0.0f32);
            #[unroll]
            for c in 0..comptime!(bp.head_dim / 16) {
                let shape = comptime!(bp.scores_shape().at(16 * c));
                s = multiply::<NS, NA>(s, q_rows[c], k_keys, &by_columns, shape);
            }

            // Logits, and the new maxima of the two rows.
            let first = (first_tile + tile) * key_tile;
            let mut maxima = softmax.maxima();
            #[unroll]
            for n in 0..comptime!(bp.key_tile / 8) {
                #[unroll]
                for e in 0..2usize {
                    let col = comptime!(n * 8 + e) + quad * 2;
                    let mut z = 0.0f32;
                    let mut there = first + col < held.len;
                    if comptime!(bp.scored) {
                        z = stages.score(stage, col, bp);
                        there = z != none;
                    }
                    let (i0, i1) = comptime!((n * 4 + e, n * 4 + 2 + e));
                    let x0 = logit_scale.apply(s.extract(i0), z);
                    let x1 = logit_scale.apply(s.extract(i1), z);
                    let x0 = select(there, x0, none);
                    let x1 = select(there, x1, none);
                    maxima.raise(x0, x1);
                    s.insert(i0, x0);
                    s.insert(i1, x1);
                }
            }
            if softmax.outgrown(&mut maxima) {
                let factors = softmax.rescale(&maxima);
                #[unroll]
                for c in 0..comptime!(bp.head_dim / 32) {
                    acc[c] = scaled::<NO>(acc[c], factors.upper, factors.lower);
                }
                softmax.rebase::<NS>(&mut s, key_tile);
            }
            let references = softmax.references();
            // O += P V, 16 keys at a time.
            #[unroll]
            for n in 0..comptime!(bp.key_tile / 16) {
                let columns = comptime!(Columns {
                    first: n * 16,
                    count: 16
                });
                let exponentials = softmax.exponentials::<NS>(&s, &references, columns);
                let p = packed::<NS, NA>(
                    &exponentials,
                    &ComptimeOption::new_None(),
                    &ComptimeOption::new_None(),
                    0usize,
                    columns,
                    comptime!(bp.element),
                );
                let keys = v_keys + comptime!(n as u32 * 16) * row_bytes;
                #[unroll]
                for c in 0..comptime!(bp.head_dim / 32) {
                    let shape = comptime!(bp.output_shape().at(32 * c));
                    acc[c] = multiply::<NO, NA>(acc[c], p, keys, &by_rows, shape);
                }
            }
        }
    }

    let sums = softmax.finish::<E>();
    let inverse0 = select(sums.upper.empty, 0.0f32, sums.upper.inverse());
    let inverse1 = select(sums.lower.empty, 0.0f32, sums.lower.inverse());
    let to = OutputRows {
        upper: out_row(q, held, &row0, part + 1),
        lower: out_row(q, held, &row1, part + 1),
        has_upper: row0.valid,
        has_lower: row1.valid,
    };
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 8) {
        let (index, first) = comptime!((c / 4, c % 4 * 4));
        let mut upper = Vector::<f32, Const<2>>::new(0.0f32);
        let mut lower = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x0: f32 = acc[index].extract(comptime!(first + e));
            let x1: f32 = acc[index].extract(comptime!(first + 2 + e));
            upper.insert(e, select(sums.upper.empty, 0.0f32, x0 * inverse0));
            lower.insert(e, select(sums.lower.empty, 0.0f32, x1 * inverse1));
        }
        let at = comptime!(c * 4) + quad;
        if to.has_upper {
            out[to.upper * comptime!(bp.head_dim / 2) + at] = upper;
        }
        if to.has_lower {
            out[to.lower * comptime!(bp.head_dim / 2) + at] = lower;
        }
    }
    sums.write_lse(&to, lse);
    sums.write_lse_rest(&to, lse_rest);
}

/// Multiplies each of the two rows of an accumulator by its factor.
#[cube]
fn scaled<N: Size>(acc: Vector<f32, N>, upper: f32, lower: f32) -> Vector<f32, N> {
    let mut out = acc;
    #[unroll]
    for i in 0..16usize {
        let factor = if comptime!(i % 4 < 2) { upper } else { lower };
        out.insert(i, acc.extract(i) * factor);
    }
    out
}

//! The portable kernel of a decode step: online softmax over the keys of a kv head.

use crate::args::Scaling;
use crate::decode::keys::{DecodeBlueprint, StepKeys};
use crate::decode::tensors::StepTensors;
use crate::portable::intervals::KeyIntervals;
use crate::portable::memory::{KeyRows, NotFinite, Row4, load_vector, shared_rows, store_row};
use crate::portable::softmax::OnlineSoftmax;
use cubecl::prelude::*;

/// Part `CUBE_POS_Y` of `CUBE_COUNT_Y` of the keys of kv head `CUBE_POS_X`, counted over all sequences, for the
/// query rows from `CUBE_POS_Z * outer_rows` on. A row is a query head of the group and a token: row `r` is head
/// `r % group` of token `r / group`. One cube owns them and writes their output and LSE over these keys.
///
/// | buffer | layout |
/// |---|---|
/// | `q` | `[batch, q_heads, tokens, head_dim]`, any strides with a contiguous last axis |
/// | `out` | contiguous `[parts, batch, q_heads, tokens, head_dim]`, f32, overwritten |
/// | `lse`, `lse_rest` | contiguous `[parts, batch, q_heads, tokens]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn decode_kernel<F: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    tensors: &StepTensors<F, N>,
    out: &mut Tensor<Vector<f32, N>>,
    lse: &mut [f32],
    lse_rest: &mut [f32],
    scaling: &Scaling,
    #[comptime] bp: DecodeBlueprint,
    #[define(F)] _element: ElemType,
) {
    let tile = comptime!(bp.tile);
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((tile.micro.units_x, tile.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((tile.outer_rows(), tile.inner_rows()));
    let keys = StepKeys::of_cube::<F, N>(tensors);
    let (q_heads, tokens) = (q.shape(1), q.shape(2));
    let group = q_heads / tensors.new_k.shape(1);
    let rows = group * tokens;
    let first_row = CUBE_POS_Z as usize * outer_rows;

    let mut intervals = KeyIntervals::new(false, tile);
    let mut not_finite = NotFinite::new();
    let mut q_rows = shared_rows(outer_rows, tile);
    let mut key_rows = KeyRows::new(false, tile);
    let mut softmax = OnlineSoftmax::new(tile);
    not_finite.first_tile();
    let mut row = UNIT_POS as usize;
    while row < outer_rows {
        let at = first_row + row;
        let token = select(at < rows, (at / group) as i32, -1i32);
        intervals.set_query(row, token);
        row += comptime!(tile.units());
    }
    let vectors = comptime!(tile.vectors());
    let mut item = UNIT_POS as usize;
    while item < comptime!(outer_rows * vectors) {
        let (row, vector) = (item / vectors, item % vectors);
        let at = first_row + row;
        let mut value = Row4::new(0.0f32);
        if at < rows && vector < comptime!(tile.head_dim / 4) {
            let head = keys.head * group + at % group;
            let base = keys.batch * q.stride(0) + head * q.stride(1) + at / group * q.stride(2);
            value = load_vector::<F, N>(q, base, vector);
        }
        q_rows[row * comptime!(tile.row_stride()) + vector] = value;
        item += comptime!(tile.units());
    }

    let total = keys.held + keys.tokens;
    let tiles = total.div_ceil(inner_rows);
    let (part, parts) = (CUBE_POS_Y as usize, CUBE_COUNT_Y as usize);
    let (from, to) = (tiles * part / parts, tiles * (part + 1) / parts);
    for turn in from..to {
        sync_cube();
        keys.load::<F, N>(
            tensors,
            turn * inner_rows,
            total,
            &mut intervals,
            &mut key_rows,
            &mut not_finite,
            bp,
        );
        sync_cube();
        not_finite.clear_next();
        softmax.attend::<KeyIntervals>(
            &q_rows,
            &key_rows.k,
            &key_rows.v,
            &intervals,
            &not_finite,
            scaling,
            tile,
        );
        not_finite.next_tile();
    }

    softmax.finish(tile);
    #[unroll(tile.unroll())]
    for o in 0..comptime!(tile.micro.outer) {
        let at = first_row + y + o * units_y;
        if at < rows {
            let head = keys.head * group + at % group;
            let batch = part * q.shape(0) + keys.batch;
            let to = (batch * q_heads + head) * tokens + at / group;
            #[unroll(tile.unroll())]
            for c in 0..comptime!(tile.unit_vectors()) {
                let n = o * comptime!(tile.unit_vectors()) + c;
                let row = to * comptime!(tile.head_dim);
                store_row::<f32, N>(out, row, x + c * units_x, softmax.acc[n], tile);
            }
            if x == 0 {
                lse[to] = softmax.row_max[o];
                lse_rest[to] = softmax.row_rest[o];
            }
        }
    }
}

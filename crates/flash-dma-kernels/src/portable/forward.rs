//! The forward kernel: online softmax over the key tiles of one query tile.

use crate::alibi::AlibiArg;
use crate::args::Scaling;
use crate::dropout::DropoutArg;
use crate::portable::args::{Keys, ListedIntervals, Operands, PairBiasArg, Sizes};
use crate::portable::blueprint::Blueprint;
use crate::portable::keys::KeyTiles;
use crate::portable::memory::{KeyRows, NotFinite, TileRows, load_tile, shared_rows};
use crate::portable::softmax::OnlineSoftmax;
use crate::portable::tile_visibility::TileVisibility;
use cubecl::prelude::*;

/// One cube owns the query tile `first_tile + CUBE_POS_X` of query head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: it
/// streams the keys that the tile may attend to and writes its rows of `out` and `lse`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `keys` | nothing, [`ListedIntervals`], or a [`TilePlan`](crate::portable::args::TilePlan) |
/// | `bias` | f32, broadcasts to the logits, any strides; none with intervals, whose scores are biases |
/// | `alibi` | the slopes, `[q_heads]`, if there is ALiBi |
/// | `dropout` | the seed and the rate of the mask, if there is dropout |
/// | `out` | `[batch, q_heads, q_len, head_dim]` without gaps, in either order of heads and queries; overwritten |
/// | `residual` | the rounding error of `out`, in the same layout |
/// | `lse`, `lse_rest` | contiguous `[batch, q_heads, q_len]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    keys: &Keys<ListedIntervals>,
    bias: &PairBiasArg,
    alibi: &AlibiArg,
    dropout: &DropoutArg,
    out: &mut Tensor<Vector<F, N>>,
    residual: &mut ComptimeOption<OwnedTensor<Vector<F, N>>>,
    lse: &mut Tensor<f32>,
    lse_rest: &mut ComptimeOption<OwnedTensor<f32>>,
    scaling: &Scaling,
    first_tile: usize,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let sizes = Sizes::of::<F, N>(operands);
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let first_query = (first_tile + CUBE_POS_X as usize) * comptime!(bp.outer_rows());
    let queries = TileRows::new(batch, head, first_query, sizes.q_len);
    let tiles = KeyTiles::of_queries(keys, &queries, sizes.kv_head(head), &sizes, bp);
    let no_lse = ComptimeOption::new_None();

    let mut visibility =
        TileVisibility::new::<ListedIntervals>(keys, bias, alibi, dropout, false, bp);
    let mut not_finite = NotFinite::new();
    let mut q_rows = shared_rows(bp.outer_rows(), bp);
    let mut key_rows = KeyRows::new(false, bp);
    let mut softmax = OnlineSoftmax::new(bp);

    visibility.own_queries(&queries, no_lse, &sizes, bp);
    let (q, rows) = (&operands.q, comptime!(bp.outer_rows()));
    load_tile::<F, N>(q, &queries, &mut q_rows, &mut not_finite, rows, bp);
    not_finite.first_tile();
    for n in 0..tiles.count(bp) {
        let tile = tiles.tile(n, bp);
        if visibility.is_active(&queries, &tile, &sizes, bp) {
            sync_cube();
            visibility.meet_keys(&tiles, &tile, &queries, no_lse, &sizes, bp);
            key_rows.load::<F, N>(operands, &tile, &mut not_finite, bp);
            sync_cube();
            not_finite.clear_next();
            softmax.attend::<TileVisibility>(
                &q_rows,
                &key_rows.k,
                &key_rows.v,
                &visibility,
                &not_finite,
                scaling,
                bp,
            );
            not_finite.next_tile();
        }
    }
    softmax.finish(bp);
    softmax.store::<F, N>(out, lse, &queries, bp);
    #[comptime]
    match lse_rest {
        ComptimeOption::Some(rest) => softmax.store_lse_rest(rest, &queries, sizes.q_heads, bp),
        ComptimeOption::None => {}
    }
    #[comptime]
    match residual {
        ComptimeOption::Some(residual) => {
            softmax.store_residual::<F, N>(residual, &queries, bp);
        }
        ComptimeOption::None => {}
    }
}

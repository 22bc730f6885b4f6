//! Forward attention on tensor cores: `mma.sync` over key tiles that `cp.async` gathers.

use crate::args::Scaling;
use crate::math::rounding_loss;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, Outputs};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::dropout::lane_mask;
use crate::matrix::fragment::{
    Accumulators, gathered, multiply_pair, scale_rows, set, set_all, swizzle, zeros,
};
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::{scores, sees, visible_logits};
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::query_tile::first_output_head;
use crate::matrix::repair::{add_not_finite, zero_not_finite};
use crate::matrix::rows::{CubeTile, OutputRows, RowPair};
use crate::matrix::softmax::{OnlineSoftmax, PerRow};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::vectors::Segment;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// One cube owns one query tile of `bp.heads` query heads that share a kv head: the tile
/// `first_tile + CUBE_COUNT_X - 1 - CUBE_POS_X`, the longest first, of the heads from
/// `CUBE_POS_Y * bp.heads` on, counted over all sequences. A warp owns 16 of its rows: their queries,
/// logits, probabilities, running maximum and sum, and their output stay in its registers. All warps
/// copy the key tiles and share them.
///
/// | buffer | layout |
/// |---|---|
/// | `operands.q` | `[batch, q_heads, q_len, head_dim]`, strides in steps of 2 elements |
/// | `operands.k`, `operands.v` | `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `source` | which keys, and what is added to their logits: [`KeySource`] |
/// | `outputs.out` | `[batch, q_heads, q_len, head_dim]` in the order of `outputs.order`, overwritten |
/// | `outputs.residual` | as `out`; absent unless `bp.residual`, and if `bp.split` |
/// | `outputs.lse`, `outputs.lse_rest` | contiguous `[batch, q_heads, q_len]`, overwritten; the second absent unless `bp.rest` |
///
/// If `bp.split`, `CUBE_COUNT_Z` cubes share a tile. Each owns a part of its key tiles and writes the output
/// and LSE of that part to `out[CUBE_POS_Z]`, `lse[CUBE_POS_Z]` and `lse_rest[CUBE_POS_Z]`, outputs as above with parts as
/// a first axis, for [`merge`](crate::forward::merge) to combine.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_mma_kernel<E: Float, O: Float>(
    operands: &Operands<E, Const<2>>,
    source: &KeySource,
    outputs: &mut Outputs<O>,
    scaling: &Scaling,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let segments = comptime!(bp.segments());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let own = CubeTile::new::<E, Const<2>>(operands, source, tiles_of, bp);
    let keys = TileKeys::new(source, &own).part(bp);
    let rows = RowPair::new(warp * 16 + lane / 4, &own, keys.begin, &source.slopes);

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let size!(NS) = comptime!(bp.key_tile / 2);
    let queries = load_queries::<E, NA>(&operands.q, &own, &rows);

    let mut stages = Stages::<E>::new(bp);
    // True if a boundary tile had values that are not finite.
    let mut not_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
    }
    let attended = AttendedKeys::new::<E, Const<2>>(operands, source, scaling, own, keys);
    let own = &attended.own;
    let keys = &attended.keys;
    let mut acc = zeros::<NC>(segments);
    let mut softmax = OnlineSoftmax::new(bp.residual);
    let mask = lane_mask(&scaling.dropout, &stages.columns, own, &rows);

    let full_tiles = keys.full_tiles(bp);
    let tiles = keys.tiles(bp);
    let mut copies = KeyCopies::new::<E, Const<2>>(operands, source, &attended, &stages);
    // Copies run `stages - 1` turns ahead of the products. Every turn closes one group of copies, an empty one past the
    // end, so that the number of groups in flight tells which tile has landed.
    let ahead = comptime!(bp.stages - 1);
    for turn in 0..tiles + ahead {
        if turn >= ahead {
            // This unit's part has landed; after the barrier all have, and the stage that is filled next is free.
            wait_copies(comptime!(bp.stages as u32 - 2));
            if attended.may_hide_not_finite(turn - ahead >= full_tiles)
                && zero_not_finite::<E>(&mut stages.v, turn - ahead, true, bp)
            {
                not_finite[0] = 1u32;
            }
            sync_cube();
        }
        if turn < tiles {
            copies.start::<E>(source, &attended, turn, &mut stages);
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            let base = tile % comptime!(bp.stages) * comptime!(bp.key_tile * bp.segments());
            let boundary = tile >= full_tiles;

            // S = Q K^T: 16 rows by a key tile per warp, then the logits in their place.
            let mut s = multiply_keys::<E, NA, NB, NC>(&def, &queries, &stages.k, base, bp);
            let mut maxima = softmax.maxima();
            if comptime!(bp.hides_apart()) {
                let seen = (attended.mask).words_of_pair::<E>(&stages, &rows, tile, boundary, bp);
                let products = gathered::<NC, NS>(&s, comptime!(bp.key_tile / 8));
                let logits = visible_logits::<E, NS>(
                    &products, &stages, source, &attended, &rows, &seen, tile, boundary,
                );
                maxima.raise_to::<NS>(&logits, comptime!(bp.key_tile));
                set_all::<NC, NS>(&mut s, &logits, comptime!(bp.key_tile / 8));
            } else {
                hide_each::<E, NC>(
                    &mut s,
                    &mut maxima,
                    &stages,
                    &attended,
                    &rows,
                    tile,
                    boundary,
                );
            }
            if softmax.outgrown(&mut maxima) {
                let factors = softmax.rescale(&maxima);
                scale_rows(&mut acc, factors.upper, factors.lower, segments);
                softmax.rebase_each(&mut s, comptime!(bp.key_tile));
            }
            // O += P V, 16 keys at a time.
            let references = softmax.references();
            softmax.note_tops(&maxima);
            #[unroll]
            for n in 0..comptime!(bp.key_tile / 16) {
                let words = &stages.columns;
                let p = softmax.fragment::<E, NA, NC>(&s, &references, &mask, words, tile, n);
                multiply_values::<E, NA, NB, NC>(&def, &p, &stages.v, base, &mut acc, n, bp);
            }
        }
    }

    let mut sums = softmax.finish::<E>();
    sums.with_dropout(&scaling.dropout);
    let upper = select(sums.upper.empty, 0.0f32, sums.upper.inverse());
    let lower = select(sums.lower.empty, 0.0f32, sums.lower.inverse());
    scale_rows(&mut acc, upper, lower, segments);
    let first_head = first_output_head(own.batch, operands.q.shape(0), own.q_heads, bp);
    // First, so that the places of these rows and those of the output are not in registers at once.
    outputs.write_lse(&sums, &OutputRows::of_pair(&rows, first_head, own.q_len));
    let to = OutputRows::in_order(&rows, first_head, own.q_len, &outputs.order);
    #[unroll]
    for c in 0..segments {
        let at = comptime!(c * 4);
        if to.has_upper {
            outputs.out[to.upper * comptime!(bp.head_dim / 2) + at + quad] =
                Vector::cast_from(acc[c][0]);
        }
        if to.has_lower {
            outputs.out[to.lower * comptime!(bp.head_dim / 2) + at + quad] =
                Vector::cast_from(acc[c][1]);
        }
    }
    #[comptime]
    match &mut outputs.residual {
        ComptimeOption::Some(residual) => write_residual::<O, NC>(residual, &acc, &to, bp),
        ComptimeOption::None => {}
    }
    sync_cube();
    if not_finite[0] == 1u32 && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        add_not_finite::<E, O, Const<2>>(
            operands, source, outputs, &attended, full_tiles, first_head, 2usize,
        );
    }
}

/// Writes the rounding error of both rows of `acc`.
#[cube]
fn write_residual<O: Float, NC: Size>(
    residual: &mut [Vector<O, Const<2>>],
    acc: &Accumulators<NC>,
    to: &OutputRows,
    #[comptime] bp: MmaBlueprint,
) {
    let quad = UNIT_POS_X as usize % 4;
    #[unroll]
    for c in 0..comptime!(bp.segments()) {
        let at = comptime!(c * 4);
        let mut upper = acc[c][0];
        let mut lower = acc[c][1];
        #[unroll]
        for e in 0..2usize {
            upper.insert(e, rounding_loss::<O>(upper.extract(e)));
            lower.insert(e, rounding_loss::<O>(lower.extract(e)));
        }
        if to.has_upper {
            residual[to.upper * comptime!(bp.head_dim / 2) + at + quad] = Vector::cast_from(upper);
        }
        if to.has_lower {
            residual[to.lower * comptime!(bp.head_dim / 2) + at + quad] = Vector::cast_from(lower);
        }
    }
}

/// The A fragments of the two rows of Q of this lane, one per 16 columns; rows without a query are zero.
#[cube]
fn load_queries<E: Float, NA: Size>(
    q: &Tensor<Vector<E, Const<2>>>,
    own: &CubeTile,
    rows: &RowPair,
) -> Sequence<Array<Vector<E, NA>>> {
    let quad = UNIT_POS_X as usize % 4;
    let at0 = own.offset(q, &rows.upper) / 2 + quad;
    let at1 = own.offset(q, &rows.lower) / 2 + quad;
    let mut fragments = Sequence::<Array<Vector<E, NA>>>::new();
    #[unroll]
    for c in 0..comptime!(own.bp.segments() / 2) {
        let mut a = Array::<Vector<E, NA>>::new(4usize);
        #[unroll]
        for half in 0..2usize {
            let mut upper = Vector::<E, Const<2>>::new(E::from_int(0));
            let mut lower = Vector::<E, Const<2>>::new(E::from_int(0));
            if rows.upper.valid {
                upper = q[at0 + comptime!(c * 8 + half * 4)];
            }
            if rows.lower.valid {
                lower = q[at1 + comptime!(c * 8 + half * 4)];
            }
            a[comptime!(half * 2)] = Vector::cast_from(upper);
            a[comptime!(half * 2 + 1)] = Vector::cast_from(lower);
        }
        fragments.push(a);
    }
    fragments
}

/// The products of this lane's queries with the keys of the tile that begins at segment `base` of the stages `k`.
#[cube]
fn multiply_keys<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    queries: &Sequence<Array<Vector<E, NA>>>,
    k: &Shared<[Segment<E>]>,
    base: usize,
    #[comptime] bp: MmaBlueprint,
) -> Accumulators<NC> {
    let lane = UNIT_POS_X as usize;
    let mut s = zeros::<NC>(comptime!(bp.key_tile / 8));
    #[unroll]
    for c in 0..comptime!(bp.segments() / 2) {
        #[unroll]
        for n in 0..comptime!(bp.key_tile / 16) {
            let row = comptime!(n * 16) + lane / 16 * 8 + lane % 8;
            let col = comptime!(c * 2) + lane / 8 % 2;
            let at = base + swizzle(row, col, comptime!(bp.segments()));
            let (keys, first) = (&k[at..at + 1], comptime!(n * 16));
            multiply_pair::<E, NA, NB, NC>(def, &queries[c], keys, &mut s, first, false);
        }
    }
    s
}

/// Adds to `acc` the products of the probabilities `p` with the `n`-th 16 values of the tile at segment `base` of `v`.
#[cube]
fn multiply_values<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    p: &Array<Vector<E, NA>>,
    v: &Shared<[Segment<E>]>,
    base: usize,
    acc: &mut Accumulators<NC>,
    #[comptime] n: usize,
    #[comptime] bp: MmaBlueprint,
) {
    let lane = UNIT_POS_X as usize;
    #[unroll]
    for c in 0..comptime!(bp.segments() / 2) {
        let row = comptime!(n * 16) + lane % 16;
        let col = comptime!(c * 2) + lane / 16;
        let at = base + swizzle(row, col, comptime!(bp.segments()));
        multiply_pair::<E, NA, NB, NC>(def, p, &v[at..at + 1], acc, comptime!(c * 16), true);
    }
}

/// Turns the products of key tile `tile` into logits, and raises the maxima to them: like [`visible_logits`], but with
/// a branch at each logit, see [`MmaBlueprint::hides_apart`].
#[cube]
fn hide_each<E: Float, NC: Size>(
    s: &mut Accumulators<NC>,
    maxima: &mut PerRow,
    stages: &Stages<E>,
    attended: &AttendedKeys,
    rows: &RowPair,
    tile: usize,
    boundary: bool,
) {
    let bp = comptime!(attended.own.bp);
    let quad = UNIT_POS_X as usize % 4;
    let k_len = attended.own.k_len;
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        let mut upper = s[n][0];
        let mut lower = s[n][1];
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let z = scores::<E>(rows, stages, tile, col, bp);
            let mut x0 = attended.scale.apply(upper.extract(e), z.upper);
            let mut x1 = attended.scale.apply(lower.extract(e), z.lower);
            if boundary {
                let none = f32::new(f32::NEG_INFINITY);
                let upper = sees::<E>(&rows.upper, stages, tile, col, k_len, bp);
                x0 = select(upper, x0, none);
                let lower = sees::<E>(&rows.lower, stages, tile, col, k_len, bp);
                x1 = select(lower, x1, none);
            }
            maxima.raise(x0, x1);
            upper.insert(e, x0);
            lower.insert(e, x1);
        }
        set(&mut s[n], 0usize, upper);
        set(&mut s[n], 1usize, lower);
    }
}

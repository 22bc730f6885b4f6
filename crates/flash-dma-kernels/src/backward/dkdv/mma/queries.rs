//! The shared memory of the dk/dv kernel: its key tile, and the query tiles that stream past it.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::alibi::{enter_slopes, key_place};
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::queries::{QueryRows, Step, StepLses, all_finite};
use crate::backward::dkdv::shared::room_if;
use crate::backward::dkdv::shared::steps::{Cursor, KeyBounds, StepOrder};
use crate::finite::is_finite;
use crate::matrix::fragment::swizzle;
use crate::matrix::logit_scale::{ExactLse, is_large, is_unusual};
use crate::matrix::ptx::copy_or_zero;
use crate::matrix::stages::copied_segment;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The shared memory of an `mma` cube's warps.
#[derive(CubeType)]
pub(crate) struct Tiles<E: Float> {
    /// `[keys, segments]`, segments swizzled.
    pub k: Shared<[Segment<E>]>,
    /// `[keys, segments]`, segments swizzled.
    pub v: Shared<[Segment<E>]>,
    /// `[stages, rows, segments]`, swizzled likewise; rows without a query are zero.
    pub q: Shared<[Segment<E>]>,
    /// `[stages, rows, segments]`, swizzled likewise; rows without a query are zero.
    pub grad_out: Shared<[Segment<E>]>,
    /// `[stages, rows]`.
    pub lse: Shared<[f32]>,
    /// `[stages, rows]`.
    pub delta: Shared<[f32]>,
    /// `[stages, rows]`: the rows' words of the dropout mask, if there is dropout.
    pub words: ComptimeOption<Shared<[u32]>>,
    /// `[keys]`: the keys' words of the dropout mask, which do not fit into registers.
    pub columns: ComptimeOption<Shared<[u32]>>,
    /// `[group]`: the ALiBi slopes, if there are any.
    pub slopes: ComptimeOption<Shared<[f32]>>,
    /// `[keys]`: the places of the keys for ALiBi.
    pub places: ComptimeOption<Shared<[f32]>>,
    /// `[2, role_warps, fragments, rows / 8, 32]`: the elements that a lane holds of each accumulator of 16 keys by 8
    /// rows. A pair that is not selected is -1; with dropout it is −∞, and one that is dropped is negative. With a softcap
    /// they are not probabilities but capped products, and a pair that is not selected is +∞.
    pub weights: Shared<[Vector<f32, Const<4>>]>,
    pub bounds: KeyBounds,
}

#[cube]
impl<E: Float> Tiles<E> {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> Tiles<E> {
        let (keys, rows) = comptime!((bp.keys(), bp.stages * bp.rows));
        let (key_segments, row_segments) = comptime!((
            bp.keys() * bp.segments(),
            bp.stages * bp.rows * bp.segments()
        ));
        let (weights, alibi) = comptime!((bp.weights(), bp.slopes > 0));
        Tiles::<E> {
            k: Shared::<[Segment<E>]>::new_aligned_slice(key_segments, 128usize),
            v: Shared::<[Segment<E>]>::new_aligned_slice(key_segments, 128usize),
            q: Shared::<[Segment<E>]>::new_aligned_slice(row_segments, 128usize),
            grad_out: Shared::<[Segment<E>]>::new_aligned_slice(row_segments, 128usize),
            lse: Shared::<[f32]>::new_aligned_slice(rows, 128usize),
            delta: Shared::<[f32]>::new_aligned_slice(rows, 128usize),
            words: room_if::<u32>(bp.dropout, rows),
            columns: room_if::<u32>(bp.dropout, keys),
            slopes: room_if::<f32>(alibi, comptime!(bp.slopes)),
            places: room_if::<f32>(alibi, keys),
            weights: Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(weights, 128usize),
            bounds: KeyBounds::new(bp),
        }
    }
}

/// Sets the slopes of a cube's group of heads and the places of its keys; the caller synchronises.
#[cube]
pub(crate) fn enter_alibi<E: Float>(
    tiles: &mut Tiles<E>,
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    place: &ChunkTile,
    #[comptime] bp: DkdvBlueprint,
) {
    enter_slopes(&mut tiles.slopes, &inputs.slopes, place, bp);
    #[comptime]
    match &mut tiles.places {
        ComptimeOption::Some(places) => {
            let unit = UNIT_POS as usize;
            if unit < comptime!(bp.keys()) && place.start + unit < place.count {
                let key = place.key_of(source, unit, bp);
                places[unit] = key_place(key, place.sizes.q_len, place.sizes.k_len, bp);
            }
        }
        ComptimeOption::None => {}
    }
}

/// Step `step`, which begins at query `query` of head `head` of the group, and whose tile is in its stage.
#[cube]
pub(crate) fn step_at<E: Float>(
    step: usize,
    query: usize,
    head: usize,
    order: &StepOrder,
    tiles: &Tiles<E>,
    #[comptime] bp: DkdvBlueprint,
) -> Step {
    let base = step % comptime!(bp.stages) * comptime!(bp.rows);
    let mut row = UNIT_POS_X as usize;
    let mut unusual = false;
    let mut not_finite = false;
    while row < comptime!(bp.rows) {
        // Non-finite elements of Q or dO make the row sum non-finite, or the LSE -inf.
        unusual = unusual || is_unusual(tiles.lse[base + row]);
        not_finite = not_finite || !is_finite(tiles.delta[base + row]);
        row += 32;
    }
    let unusual = plane_any(unusual);
    let full = order.is_full(step, query, bp);
    let boundary = !full || unusual;
    let mut empty = false;
    let mut large = false;
    if unusual {
        let lses = UnusualLses::find::<E>(tiles, step, bp);
        empty = lses.empty;
        large = lses.large;
    }
    let mut unknown = empty;
    if comptime!(bp.pattern.is_planned()) {
        // Queries that see nothing are common there; non-finite queries are not.
        if empty {
            unknown = plane_any(!all_finite::<E>(&tiles.q, step % comptime!(bp.stages), bp));
        }
    }
    if comptime!(bp.softcap) {
        // A capped logit does not reveal an infinite query.
        if boundary {
            not_finite = not_finite || !all_finite::<E>(&tiles.q, step % comptime!(bp.stages), bp);
        }
    }
    Step {
        query,
        head,
        boundary,
        large,
        not_finite: boundary && (unknown || plane_any(not_finite)),
    }
}

/// Two kinds of unusual LSEs, and whether a tile has some.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct UnusualLses {
    /// -inf, of a row that attends to nothing.
    pub empty: bool,
    pub large: bool,
}

#[cube]
impl UnusualLses {
    /// Checks the rows of step `step`, whose tile is in its stage.
    pub(crate) fn find<E: Float>(
        tiles: &Tiles<E>,
        step: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> UnusualLses {
        let base = step % comptime!(bp.stages) * comptime!(bp.rows);
        let mut row = UNIT_POS_X as usize;
        let mut empty = false;
        let mut large = false;
        while row < comptime!(bp.rows) {
            empty = empty || tiles.lse[base + row] == f32::new(f32::NEG_INFINITY);
            large = large || is_large(tiles.lse[base + row]);
            row += 32;
        }
        UnusualLses {
            empty: plane_any(empty),
            large: plane_any(large),
        }
    }
}

/// The query of row `row` of the tile of `step` in `stage`; -1 if the row has no query, or attends to nothing.
#[cube]
pub(crate) fn query_of<E: Float>(
    tiles: &Tiles<E>,
    row: usize,
    stage: usize,
    step: &Step,
    #[comptime] bp: DkdvBlueprint,
) -> i32 {
    let mut is_query = tiles.lse[stage * comptime!(bp.rows) + row] != f32::new(f32::NEG_INFINITY);
    if comptime!(bp.rows != bp.queries() * bp.heads) {
        is_query = is_query && row < comptime!(bp.queries() * bp.heads);
    }
    let query = (step.query + row % comptime!(bp.queries())) as i32;
    select(is_query, query, i32::new(-1))
}

/// The LSE of row `row` of the tile of `step` in `stage`, in the form that serves the step: a large one as it is, from
/// memory, any other as the rest of an LSE of zero, which [`exp_of`](crate::matrix::logit_scale::exp_of) subtracts.
#[cube]
pub(crate) fn lse_of<E: Float>(
    lses: &StepLses,
    tiles: &Tiles<E>,
    row: usize,
    stage: usize,
    step: &Step,
    #[comptime] boundary: bool,
    #[comptime] bp: DkdvBlueprint,
) -> ExactLse {
    let lse = tiles.lse[stage * comptime!(bp.rows) + row];
    let mut split = ExactLse {
        lse: 0.0f32,
        rest: -lse * comptime!(core::f32::consts::LOG2_E),
    };
    if comptime!(boundary) {
        // Other LSEs of the step may be -inf, of rows that attend to nothing.
        if step.large && is_large(lse) {
            let exact = lses.exact(row, bp);
            split.lse = exact.lse;
            split.rest = exact.rest;
        }
    }
    split
}

/// Starts the copies of step `step`, at `cursor`: queries, output gradients, LSE and row sums.
#[cube]
pub(crate) fn copy_step<E: Float>(
    inputs: &BackwardInputs<E>,
    rows: &QueryRows,
    cursor: &Cursor,
    step: usize,
    tiles: &mut Tiles<E>,
    #[comptime] bp: DkdvBlueprint,
) {
    let segments = comptime!(bp.segments());
    let queries = comptime!(bp.queries());
    let unit = UNIT_POS as usize;
    let stage = step % comptime!(bp.stages);
    let first_query = cursor.tile * queries;
    let first_head = cursor.head;
    #[unroll]
    for c in 0..comptime!((bp.rows * bp.segments()).div_ceil(bp.units())) {
        let own = copied_segment(c, comptime!(bp.units()), segments);
        let (row, col) = (own.row, own.col);
        if comptime!((bp.rows * bp.segments()).is_multiple_of(bp.units()))
            || row < comptime!(bp.rows)
        {
            let place = stage * comptime!(bp.rows * bp.segments()) + swizzle(row, col, segments);
            let query = first_query + row % queries;
            let head = rows.head + first_head + row / queries;
            // A copy of zero bytes fills its destination with zeros and reads nothing.
            let there = row < comptime!(bp.queries() * bp.heads) && query < rows.len;
            let from = rows.q + head * rows.q_head + query * rows.q_row + col;
            copy_or_zero(
                &inputs.q[from..from + 1],
                &mut tiles.q[place..place + 1],
                there,
                16u32,
            );
            let from = rows.o + head * rows.o_head + query * rows.o_row + col;
            copy_or_zero(
                &inputs.grad_out[from..from + 1],
                &mut tiles.grad_out[place..place + 1],
                there,
                16u32,
            );
        }
    }
    if unit < comptime!(bp.rows) {
        let place = stage * comptime!(bp.rows) + unit;
        let query = first_query + unit % queries;
        let there = unit < comptime!(bp.queries() * bp.heads) && query < rows.len;
        let from = rows.row + (first_head + unit / queries) * rows.len + query;
        copy_number::<f32>(&inputs.lse, from, &mut tiles.lse, place, there);
        copy_number::<f32>(&inputs.delta, from, &mut tiles.delta, place, there);
        #[comptime]
        match &mut tiles.words {
            ComptimeOption::Some(words) => {
                let from_words = inputs.words.as_ref().unwrap();
                copy_number::<u32>(from_words, from, words, place, there);
            }
            ComptimeOption::None => {}
        }
    }
}

/// Starts the copy of number `from` to `place` of `to`, or of zero if it is not `there`.
#[cube]
pub(crate) fn copy_number<T: CubePrimitive>(
    numbers: &[T],
    from: usize,
    to: &mut Shared<[T]>,
    place: usize,
    there: bool,
) {
    copy_or_zero(
        &numbers[from..from + 1],
        &mut to[place..place + 1],
        there,
        4u32,
    );
}

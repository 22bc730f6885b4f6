//! The shared memory of the dk/dv kernel: its key tile, and the query tiles that stream past it.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::mask::StepList;
use crate::finite::is_finite;
use crate::matrix::copies::copied_chunk;
use crate::matrix::fragment::swizzle;
use crate::matrix::ptx::copy_or_zero;
use crate::pattern::layout::HEAD_BITS;
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// The shared memory of an `mma` cube's warps.
#[derive(CubeType)]
pub(crate) struct Tiles<E: Float> {
    /// `[keys, chunks]`, chunks swizzled.
    pub k: Shared<[Chunk<E>]>,
    /// `[keys, chunks]`, chunks swizzled.
    pub v: Shared<[Chunk<E>]>,
    /// `[stages, rows, chunks]`, likewise; rows without a query are zero.
    pub q: Shared<[Chunk<E>]>,
    /// `[stages, rows, chunks]`, likewise; rows without a query are zero.
    pub grad_out: Shared<[Chunk<E>]>,
    /// `[stages, rows]`.
    pub lse: Shared<[f32]>,
    /// `[stages, rows]`.
    pub delta: Shared<[f32]>,
    /// `[2, role_warps, fragments, rows / 8, 32]`: the elements that a lane holds of each accumulator of 16 keys by 8
    /// rows; -1 where a pair is not selected.
    pub weights: Shared<[Vector<f32, Const<4>>]>,
    /// `[keys]`: first query of the chunk that attends to the key; 0 past the last key.
    pub first: Shared<[i32]>,
    /// `[keys]`: one past the last query of the chunk that does.
    pub end: Shared<[i32]>,
}

#[cube]
impl<E: Float> Tiles<E> {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> Tiles<E> {
        let keys = comptime!(bp.keys());
        let chunks = comptime!(bp.chunks());
        Tiles::<E> {
            k: Shared::<[Chunk<E>]>::new_aligned_slice(keys * chunks, comptime!(bp.alignment())),
            v: Shared::<[Chunk<E>]>::new_aligned_slice(keys * chunks, comptime!(bp.alignment())),
            q: Shared::<[Chunk<E>]>::new_aligned_slice(
                comptime!(bp.stages * bp.rows * bp.chunks()),
                comptime!(bp.alignment()),
            ),
            grad_out: Shared::<[Chunk<E>]>::new_aligned_slice(
                comptime!(bp.stages * bp.rows * bp.chunks()),
                comptime!(bp.alignment()),
            ),
            lse: Shared::<[f32]>::new_aligned_slice(comptime!(bp.stages * bp.rows), 128usize),
            delta: Shared::<[f32]>::new_aligned_slice(comptime!(bp.stages * bp.rows), 128usize),
            weights: Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(
                comptime!(bp.weights()),
                128usize,
            ),
            first: Shared::<[i32]>::new_aligned_slice(keys, 128usize),
            end: Shared::<[i32]>::new_aligned_slice(keys, 128usize),
        }
    }
}

/// Locations of the tensors of one kv head's queries, and their length.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct QueryRows {
    /// In chunks: start of the sequence, stride between heads, stride between queries.
    pub q: usize,
    pub q_head: usize,
    pub q_row: usize,
    /// The same of the output gradient.
    pub o: usize,
    pub o_head: usize,
    pub o_row: usize,
    /// The first head of the group, and its first row of `lse` and `delta`.
    pub head: usize,
    pub row: usize,
    /// Queries per head.
    pub len: usize,
}

#[cube]
impl QueryRows {
    /// The queries of kv head `kv_head` of sequence `batch`, of `group` heads.
    pub(crate) fn new<E: Float>(
        q: &Tensor<Chunk<E>>,
        grad_out: &Tensor<Chunk<E>>,
        batch: usize,
        kv_head: usize,
        group: usize,
    ) -> QueryRows {
        let (heads, len) = (q.shape(1), q.shape(2));
        QueryRows {
            q: batch * q.stride(0) / 8,
            q_head: q.stride(1) / 8,
            q_row: q.stride(2) / 8,
            o: batch * grad_out.stride(0) / 8,
            o_head: grad_out.stride(1) / 8,
            o_row: grad_out.stride(2) / 8,
            head: kv_head * group,
            row: (batch * heads + kv_head * group) * len,
            len,
        }
    }
}

/// The query tiles that a key tile streams.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Range {
    /// The first query tile of a head.
    pub first: usize,
    /// Query tiles of a head.
    pub tiles: usize,
    /// Every key is attended to by the queries `full_from .. full_to`, if any.
    pub full_from: i32,
    pub full_to: i32,
}

#[cube]
impl Range {
    /// An empty range.
    pub(crate) fn none() -> Range {
        Range {
            first: 0usize,
            tiles: 0usize,
            full_from: 0i32,
            full_to: 0i32,
        }
    }
}

/// The queries and the heads of a step. Steps run over a range's tiles for each group of heads in turn.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Cursor {
    /// The query tile of a head.
    pub tile: usize,
    /// The first head, within the group of the kv head.
    pub head: usize,
}

#[cube]
impl Cursor {
    /// The first step of a range.
    pub(crate) fn first(range: &Range) -> Cursor {
        Cursor {
            tile: range.first,
            head: 0usize,
        }
    }

    /// The first step of a list if `bp.pattern.is_planned()`, otherwise of a range.
    pub(crate) fn first_of(
        list: &StepList,
        range: &Range,
        #[comptime] bp: DkdvBlueprint,
    ) -> Cursor {
        if comptime!(bp.pattern.is_planned()) {
            Cursor::listed(list.entry(0usize), bp)
        } else {
            Cursor::first(range)
        }
    }

    /// The step of an entry of a [`StepList`].
    pub(crate) fn listed(entry: u32, #[comptime] bp: DkdvBlueprint) -> Cursor {
        Cursor {
            tile: (entry >> comptime!(HEAD_BITS as u32)) as usize,
            head: (entry & comptime!((1u32 << HEAD_BITS) - 1)) as usize * comptime!(bp.heads),
        }
    }

    /// Moves on to the next step.
    pub(crate) fn advance(&mut self, range: &Range, #[comptime] bp: DkdvBlueprint) {
        self.tile += 1;
        if self.tile == range.first + range.tiles {
            self.tile = range.first;
            self.head += comptime!(bp.heads);
        }
    }
}

/// How the pairs of a step must be treated.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Step {
    /// The first query of the tile.
    pub query: usize,
    /// Whether some pair may not be selected.
    pub boundary: bool,
    /// Whether, in addition, some row of Q or dO may not be finite.
    pub broken: bool,
}

#[cube]
impl Step {
    /// Step `step` of a list if `bp.pattern.is_planned()`, otherwise of a range. It begins at query `query`, and its
    /// tile is in its stage.
    pub(crate) fn at<E: Float>(
        step: usize,
        query: usize,
        list: &StepList,
        range: &Range,
        tiles: &Tiles<E>,
        #[comptime] bp: DkdvBlueprint,
    ) -> Step {
        let base = step % comptime!(bp.stages) * comptime!(bp.rows);
        let mut row = UNIT_POS_X as usize;
        let mut empty = false;
        let mut broken = false;
        while row < comptime!(bp.rows) {
            // Non-finite elements of Q or dO make the row sum non-finite, or the LSE -inf.
            empty = empty || tiles.lse[base + row] == f32::new(f32::NEG_INFINITY);
            broken = broken || !is_finite(tiles.delta[base + row]);
            row += 32;
        }
        let empty = plane_any(empty);
        let whole = if comptime!(bp.pattern.is_planned()) {
            step < list.whole
        } else {
            comptime!(bp.rows == bp.queries() * bp.heads)
                && range.full_from <= query as i32
                && (query + comptime!(bp.queries())) as i32 <= range.full_to
        };
        let boundary = !whole || empty;
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
                broken = broken || !all_finite::<E>(&tiles.q, step % comptime!(bp.stages), bp);
            }
        }
        Step {
            query,
            boundary,
            broken: boundary && (unknown || plane_any(broken)),
        }
    }
}

/// Whether this lane's share of the rows of `stage` is finite.
#[cube]
fn all_finite<E: Float>(
    rows: &Shared<[Chunk<E>]>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) -> bool {
    let mut at = UNIT_POS_X as usize;
    let mut finite = true;
    while at < comptime!(bp.rows * bp.chunks()) {
        let values = rows[stage * comptime!(bp.rows * bp.chunks()) + at];
        #[unroll]
        for e in 0..8usize {
            finite = finite && is_finite(f32::cast_from(values.extract(e)));
        }
        at += 32;
    }
    finite
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
    let chunks = comptime!(bp.chunks());
    let queries = comptime!(bp.queries());
    let unit = UNIT_POS as usize;
    let stage = step % comptime!(bp.stages);
    let first_query = cursor.tile * queries;
    let first_head = cursor.head;
    #[unroll]
    for c in 0..comptime!((bp.rows * bp.chunks()).div_ceil(bp.units())) {
        let own = copied_chunk(c, comptime!(bp.units()), chunks);
        let (row, col) = (own.row, own.col);
        if comptime!((bp.rows * bp.chunks()).is_multiple_of(bp.units())) || row < comptime!(bp.rows)
        {
            let place = stage * comptime!(bp.rows * bp.chunks()) + swizzle(row, col, chunks);
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
        copy_or_zero(
            &inputs.lse[from..from + 1],
            &mut tiles.lse[place..place + 1],
            there,
            4u32,
        );
        copy_or_zero(
            &inputs.delta[from..from + 1],
            &mut tiles.delta[place..place + 1],
            there,
            4u32,
        );
    }
}

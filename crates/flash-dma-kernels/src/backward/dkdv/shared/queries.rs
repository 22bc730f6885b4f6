//! The queries that stream past a key tile: their locations, and the treatment of a step's pairs.

use crate::args::Scaling;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::steps::StepOrder;
use crate::dropout::{DropoutArg, copied};
use crate::finite::is_finite;
use crate::matrix::logit_scale::{ExactLse, LogitScale};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// Locations of the tensors of one kv head's queries, and their length.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct QueryRows {
    /// In segments: start of the sequence, stride between heads, stride between queries.
    pub q: usize,
    pub q_head: usize,
    pub q_row: usize,
    /// The same for the output gradient.
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
    /// The queries of the kv head of `place`.
    fn new<E: Float>(inputs: &BackwardInputs<E>, place: &ChunkTile) -> QueryRows {
        let (q, grad_out) = (&inputs.q, &inputs.grad_out);
        let (batch, kv_head, group) = (place.batch, place.kv_head, place.sizes.group);
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

/// The treatment of a step's pairs.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Step {
    /// First query of the tile.
    pub query: usize,
    /// First head of the tile, within the group; only with biases per pair and with ALiBi.
    pub head: usize,
    /// True if some pair may not be selected, or some LSE is large.
    pub boundary: bool,
    /// True if some LSE is large: probabilities are then computed by [`StepLses`].
    pub large: bool,
    /// True if, in addition, some row of Q or dO may not be finite.
    pub not_finite: bool,
}

/// Locations of the LSEs of a step's rows in memory, read only if some are large, so as not to take shared memory.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepLses<'a> {
    /// All LSEs, and the part that their rounding lost.
    lse: &'a [f32],
    rest: &'a [f32],
    /// The first row of `lse` of the step's first head.
    row: usize,
    /// The step's first query.
    query: usize,
    /// Queries per head.
    len: usize,
}

#[cube]
impl<'a> StepLses<'a> {
    /// The locations of step `step`, at turn `turn` of `order`, if some LSEs are large.
    pub(crate) fn of<E: Float>(
        inputs: &'a BackwardInputs<E>,
        step: &Step,
        turn: usize,
        order: &StepOrder,
        rows: &QueryRows,
        #[comptime] bp: DkdvBlueprint,
    ) -> StepLses<'a> {
        let mut row = rows.row;
        if step.large {
            row += order.at(turn, bp).head * rows.len;
        }
        StepLses::<'a> {
            lse: &inputs.lse,
            rest: &inputs.lse_rest,
            row,
            query: step.query,
            len: rows.len,
        }
    }

    /// The locations of step `step` of head `head` of the group and of the heads after it.
    pub(crate) fn of_head<E: Float>(
        inputs: &'a BackwardInputs<E>,
        head: usize,
        step: &Step,
        rows: &QueryRows,
    ) -> StepLses<'a> {
        StepLses::<'a> {
            lse: &inputs.lse,
            rest: &inputs.lse_rest,
            row: rows.row + head * rows.len,
            query: step.query,
            len: rows.len,
        }
    }

    /// A placeholder that is never read.
    pub(crate) fn none<E: Float>(inputs: &'a BackwardInputs<E>) -> StepLses<'a> {
        StepLses::<'a> {
            lse: &inputs.lse,
            rest: &inputs.lse_rest,
            row: 0usize,
            query: 0usize,
            len: 0usize,
        }
    }

    /// The LSE of row `row` of the tile. A row without a query gets that of another.
    pub(crate) fn exact(&self, row: usize, #[comptime] bp: DkdvBlueprint) -> ExactLse {
        let queries = comptime!(bp.queries());
        let query = min(self.query + row % queries, self.len - 1);
        let behind = select(
            row < comptime!(bp.queries() * bp.heads),
            row / queries,
            0usize,
        );
        let at = self.row + behind * self.len + query;
        ExactLse::read(self.lse, self.rest, at)
    }
}

/// True if this lane's share of the rows of `stage` is finite.
#[cube]
pub(crate) fn all_finite<E: Float>(
    rows: &Shared<[Segment<E>]>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) -> bool {
    let mut at = UNIT_POS_X as usize;
    let mut finite = true;
    while at < comptime!(bp.rows * bp.segments()) {
        let values = rows[stage * comptime!(bp.rows * bp.segments()) + at];
        #[unroll]
        for e in 0..8usize {
            finite = finite && is_finite(f32::cast_from(values.extract(e)));
        }
        at += 32;
    }
    finite
}

/// The inputs of the pairs of a warp's keys and the queries.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Pairs {
    pub rows: QueryRows,
    pub mask: KeyMask,
    pub logit_scale: LogitScale,
    pub dropout: DropoutArg,
    #[cube(comptime)]
    pub bp: DkdvBlueprint,
}

#[cube]
impl Pairs {
    /// The pairs of the keys of `mask` and the queries of the kv head of `place`.
    pub(crate) fn new<E: Float>(
        inputs: &BackwardInputs<E>,
        place: &ChunkTile,
        mask: KeyMask,
        scaling: &Scaling,
        #[comptime] bp: DkdvBlueprint,
    ) -> Pairs {
        Pairs {
            rows: QueryRows::new::<E>(inputs, place),
            mask,
            logit_scale: LogitScale::new(scaling, comptime!(bp.logit_form())),
            dropout: copied(&scaling.dropout),
            bp,
        }
    }
}

//! The rows of a step: the token and head of each, and its location.

use crate::decode::mma::blueprint::ROWS;
use crate::decode::mma::stream::Held;
use cubecl::prelude::*;

/// A query row of a tile: row `r` of a kv head is head `r % group` of token `r / group`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepRow {
    pub token: usize,
    /// Index among the query heads of a sequence.
    pub head: usize,
    pub valid: bool,
}

#[cube]
impl StepRow {
    /// Row `r` of the 16 rows of `CUBE_POS_Z`; padding rows become row 0.
    pub(crate) fn new(r: usize, held: &Held) -> StepRow {
        let group = held.group;
        let row = CUBE_POS_Z as usize * ROWS + r;
        let valid = row < group * held.tokens;
        let at = select(valid, row, 0);
        StepRow {
            token: at / group,
            head: held.head * group + at % group,
            valid,
        }
    }
}

/// The start of a row in `q`, in pairs.
#[cube]
pub(crate) fn q_at<E: Float>(q: &Tensor<Vector<E, Const<2>>>, held: &Held, row: &StepRow) -> usize {
    (held.batch * q.stride(0) + row.head * q.stride(1) + row.token * q.stride(2)) / 2
}

/// The row of the outputs of part `part`.
#[cube]
pub(crate) fn out_row<E: Float>(
    q: &Tensor<Vector<E, Const<2>>>,
    held: &Held,
    row: &StepRow,
    part: usize,
) -> usize {
    ((part * q.shape(0) + held.batch) * q.shape(1) + row.head) * held.tokens + row.token
}

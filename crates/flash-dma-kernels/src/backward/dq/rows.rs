//! The two rows of a lane of the dq kernels.

use crate::args::Scaling;
use crate::matrix::args::{KeySource, SavedRows};
use crate::matrix::dropout::{LaneMask, lane_mask};
use crate::matrix::logit_scale::{ExactLse, is_large_scaled, scaled_lse};
use crate::matrix::ptx::{any_lane, any_unit};
use crate::matrix::rows::{CubeTile, OutputRows, RowPair};
use crate::matrix::softmax::PerRow;
use crate::matrix::stages::Stages;
use cubecl::prelude::*;

/// The LSE and row sum of a row, for the weights of its pairs.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneRow {
    /// The [`scaled_lse`].
    pub reference: f32,
    pub delta: f32,
}

/// The two rows whose elements a lane holds, and their saved numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneRows {
    pub pair: RowPair,
    /// Their locations in the gradient of q and in the saved tensors.
    pub to: OutputRows,
    pub lse: PerRow,
    pub upper: LaneRow,
    pub lower: LaneRow,
    /// Their dropout mask, if there is any.
    pub mask: ComptimeOption<LaneMask>,
}

#[cube]
impl LaneRows {
    /// This lane's rows of the tile that a cube owns.
    pub(crate) fn read<E: Float>(
        saved: &SavedRows,
        source: &KeySource,
        scaling: &Scaling,
        stages: &Stages<E>,
        own: &CubeTile,
    ) -> LaneRows {
        let upper = UNIT_POS_Y as usize * 16 + UNIT_POS_X as usize / 4;
        let pair = RowPair::new(upper, own, 0usize, &source.slopes);
        let to = OutputRows::of_pair(&pair, own.batch * own.q_heads, own.q_len);
        let mut lse0 = 0.0f32;
        let mut lse1 = 0.0f32;
        let mut rest0 = 0.0f32;
        let mut rest1 = 0.0f32;
        let mut delta0 = 0.0f32;
        let mut delta1 = 0.0f32;
        if to.has_upper {
            let exact = ExactLse::read(&saved.lse, &saved.lse_rest, to.upper);
            lse0 = exact.lse;
            rest0 = exact.rest;
            delta0 = saved.delta[to.upper];
        }
        if to.has_lower {
            let exact = ExactLse::read(&saved.lse, &saved.lse_rest, to.lower);
            lse1 = exact.lse;
            rest1 = exact.rest;
            delta1 = saved.delta[to.lower];
        }
        let mask = lane_mask(&scaling.dropout, &stages.columns, own, &pair);
        LaneRows {
            pair,
            to,
            lse: PerRow {
                upper: lse0,
                lower: lse1,
            },
            upper: LaneRow {
                reference: scaled_lse(lse0, rest0),
                delta: delta0,
            },
            lower: LaneRow {
                reference: scaled_lse(lse1, rest1),
                delta: delta1,
            },
            mask,
        }
    }
}

#[cube]
impl LaneRows {
    /// True if some LSE of the cube's rows is large; its probabilities are computed by [`exact`](Self::exact) LSEs. All
    /// units must call it, once: a vote in each tile would take time from all.
    pub(crate) fn any_large(&self) -> bool {
        any_unit(self.own_large())
    }

    /// True if the LSE of a row of the warp is large. All lanes must call it.
    pub(crate) fn large(&self) -> bool {
        any_lane(self.own_large())
    }

    fn own_large(&self) -> bool {
        is_large_scaled(self.upper.reference) || is_large_scaled(self.lower.reference)
    }

    /// The LSEs of the rows, read again: seldom needed, they would take registers from all tiles.
    pub(crate) fn exact(&self, saved: &SavedRows) -> ExactRows {
        // A row that does not exist gets that of another.
        let upper = select(self.to.has_upper, self.to.upper, 0usize);
        let lower = select(self.to.has_lower, self.to.lower, 0usize);
        ExactRows {
            upper: ExactLse::read(&saved.lse, &saved.lse_rest, upper),
            lower: ExactLse::read(&saved.lse, &saved.lse_rest, lower),
        }
    }
}

/// The LSEs of a lane's two rows.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ExactRows {
    pub upper: ExactLse,
    pub lower: ExactLse,
}

#[cube]
impl ExactRows {
    /// A placeholder for probabilities that are not exact.
    pub(crate) fn none() -> ExactRows {
        ExactRows {
            upper: ExactLse {
                lse: 0.0f32,
                rest: 0.0f32,
            },
            lower: ExactLse {
                lse: 0.0f32,
                rest: 0.0f32,
            },
        }
    }
}

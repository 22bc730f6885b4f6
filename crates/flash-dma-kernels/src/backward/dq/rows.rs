//! The two rows of a lane of the dq kernels.

use crate::alibi::AlibiArg;
use crate::dropout::DropoutArg;
use crate::matrix::args::SavedRows;
use crate::matrix::dropout::{LaneMask, lane_mask};
use crate::matrix::query_tile::{CubeTile, OutputRows, RowPair};
use crate::matrix::softmax::PerRow;
use cubecl::prelude::*;

/// What a row's weights are computed with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneRow {
    /// `-log2(e) * lse`.
    pub reference: f32,
    /// Its row sum.
    pub delta: f32,
}

/// The two rows of which a lane holds elements, and what was saved of them.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneRows {
    pub pair: RowPair,
    /// Where they lie in the gradient of q and in what was saved.
    pub to: OutputRows,
    pub lse: PerRow,
    pub upper: LaneRow,
    pub lower: LaneRow,
    /// Which of their pairs dropout leaves, if there is any.
    pub mask: ComptimeOption<LaneMask>,
}

#[cube]
impl LaneRows {
    /// This lane's rows of the tile that a cube owns; `words` are those of the stages' keys.
    pub(crate) fn read(
        saved: &SavedRows,
        slopes: &AlibiArg,
        dropout: &DropoutArg,
        words: &ComptimeOption<Shared<[u32]>>,
        own: &CubeTile,
    ) -> LaneRows {
        let upper = UNIT_POS_Y as usize * 16 + UNIT_POS_X as usize / 4;
        let pair = RowPair::new(upper, own, 0usize, slopes);
        let to = OutputRows::of_pair(&pair, own.batch * own.q_heads, own.q_len);
        let mut lse0 = 0.0f32;
        let mut lse1 = 0.0f32;
        let mut delta0 = 0.0f32;
        let mut delta1 = 0.0f32;
        if to.has_upper {
            lse0 = saved.lse[to.upper];
            delta0 = saved.delta[to.upper];
        }
        if to.has_lower {
            lse1 = saved.lse[to.lower];
            delta1 = saved.delta[to.lower];
        }
        let log2e = comptime!(core::f32::consts::LOG2_E);
        let mask = lane_mask(dropout, words, own, &pair);
        LaneRows {
            pair,
            to,
            lse: PerRow {
                upper: lse0,
                lower: lse1,
            },
            upper: LaneRow {
                reference: -lse0 * log2e,
                delta: delta0,
            },
            lower: LaneRow {
                reference: -lse1 * log2e,
                delta: delta1,
            },
            mask,
        }
    }
}

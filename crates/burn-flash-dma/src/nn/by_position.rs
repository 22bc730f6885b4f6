//! What the position of a token adds to its rank.

use super::config::{Scores, Selection};
use crate::validate::at_least_zero;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use flash_dma_problem::AttentionError;

/// Where the first of some tokens stands in its sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum First<'a> {
    /// At one position in every sequence.
    At(usize),
    /// At a position per sequence that the device counts, `[sequences]`.
    OnDevice(&'a Tensor<1, Int>),
}

/// How much lower a token ranks in heads that were not dealt it: more than any score of a normalised token.
const PENALTY: f32 = 1000.0;

/// What a position adds to the scores of its token.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByPosition {
    /// Per position.
    slope: f32,
    /// Tokens in a row that a head is dealt at once.
    turns: Option<usize>,
}

impl ByPosition {
    /// That of a layer; `None` if it is nothing.
    ///
    /// # Errors
    ///
    /// [`AttentionError::RecencySlope`] if the slope is negative or not finite in f32, or if the scores do more than rank
    /// or the layer is not causal; [`AttentionError::Turns`] if tokens are dealt 0 at a time or more than an i32 counts,
    /// or the scores do more than rank.
    pub(super) fn try_new(
        selection: &Selection,
        scores: Scores,
        causal: bool,
    ) -> Result<Option<Self>, AttentionError> {
        let Selection {
            recency_slope: slope,
            turns,
            ..
        } = *selection;
        let ranks = scores == Scores::Ranking;
        if slope != 0.0 && !(at_least_zero(slope).is_some() && ranks && causal) {
            return Err(AttentionError::RecencySlope { slope });
        }
        if let Some(run) = turns
            && !(run > 0 && i32::try_from(run).is_ok() && ranks)
        {
            return Err(AttentionError::Turns { run });
        }
        let by_position = Self {
            slope: slope as f32,
            turns,
        };
        Ok((slope != 0.0 || turns.is_some()).then_some(by_position))
    }

    /// The scores `[batch, kv_heads, len]` of tokens, and what their positions add.
    pub(super) fn added(self, scores: Tensor<3>, first: First<'_>) -> Tensor<3> {
        let [batch, heads, len] = scores.dims();
        if batch * heads * len == 0 {
            return scores;
        }
        let device = scores.device();
        let positions = match first {
            First::At(first) => in_a_row(first, len, &device),
            First::OnDevice(firsts) if firsts.dims() == [batch] => {
                firsts.clone().reshape([batch, 1, 1]) + in_a_row(0, len, &device)
            }
            // A cache of other sequences refuses the step.
            First::OnDevice(_) => return scores,
        };
        let scores = match self.turns {
            Some(run) => {
                let turn = (positions.clone() / run as i32) % heads as i32;
                let head = Tensor::<1, Int>::arange(0..heads as i64, (&device, DType::I32));
                let others = turn.not_equal(head.reshape([1, heads, 1]));
                scores - others.float().cast(FloatDType::F32) * PENALTY
            }
            None => scores,
        };
        match self.slope {
            0.0 => scores,
            slope => scores + positions.cast(FloatDType::F32) * slope,
        }
    }
}

/// Positions in a row: `[1, 1, len]`.
fn in_a_row(first: usize, len: usize, device: &Device) -> Tensor<3, Int> {
    let positions = first as i64..(first + len) as i64;
    Tensor::<1, Int>::arange(positions, (device, DType::I32)).reshape([1, 1, len])
}

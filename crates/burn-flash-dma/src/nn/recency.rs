//! Ranks that rise with the position of a token.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole};

/// Where the first of some tokens stands in its sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum First<'a> {
    /// At one position in every sequence.
    At(usize),
    /// At a position per sequence that the device counts, `[sequences]`.
    OnDevice(&'a Tensor<1, Int>),
}

/// What a position adds to the score of its token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recency {
    /// Per position.
    slope: f32,
}

impl Recency {
    /// The slope of a layer; `None` if it is 0.
    ///
    /// # Errors
    ///
    /// [`AttentionError::RecencySlope`] if it is negative or not finite in f32, or if the scores do more than rank or the
    /// layer is not causal.
    pub(super) fn try_new(
        slope: f64,
        role: ScoreRole,
        causal: bool,
    ) -> Result<Option<Self>, AttentionError> {
        if slope == 0.0 {
            return Ok(None);
        }
        let recency = Self {
            slope: slope as f32,
        };
        let is_slope = slope > 0.0 && recency.slope.is_finite();
        match is_slope && role == ScoreRole::Rank && causal {
            true => Ok(Some(recency)),
            false => Err(AttentionError::RecencySlope { slope }),
        }
    }

    /// The scores `[batch, kv_heads, len]` of tokens, and what their positions add.
    pub(super) fn added(self, scores: Tensor<3>, first: First<'_>) -> Tensor<3> {
        let [batch, _, len] = scores.dims();
        let device = scores.device();
        let positions = match first {
            First::At(first) => run(first, len, &device),
            First::OnDevice(firsts) if firsts.dims() == [batch] => {
                firsts.clone().reshape([batch, 1, 1]) + run(0, len, &device)
            }
            // A cache of other sequences refuses the step.
            First::OnDevice(_) => return scores,
        };
        scores + positions.cast(FloatDType::F32) * self.slope
    }
}

/// Positions in a row: `[1, 1, len]`.
fn run(first: usize, len: usize, device: &Device) -> Tensor<3, Int> {
    let positions = first as i64..(first + len) as i64;
    Tensor::<1, Int>::arange(positions, (device, DType::I32)).reshape([1, 1, len])
}

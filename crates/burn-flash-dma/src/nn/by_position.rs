//! The part of a token's rank that depends on its position.

use super::config::Selection;
use super::scorer::Scores;
use crate::fallback::running::arange;
use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use flash_dma_problem::AttentionError;

/// Position of the first token of a call in its sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum First<'a> {
    /// The same position in every sequence.
    At(usize),
    /// A position per sequence, counted on the device, `[sequences]`.
    OnDevice(&'a Tensor<1, Int>),
}

/// Subtracted from a token's score in heads it was not dealt to: more than any score of a normalised token.
const PENALTY: f32 = 1000.0;

#[derive(Module, Debug)]
pub(super) struct ByPosition {
    /// 1 for heads that rank later tokens higher, 0 for the others: `[1, kv_heads, 1]`.
    prefers: Option<Tensor<3>>,
    /// Length of the runs of tokens dealt to the heads.
    #[module(skip)]
    turns: Option<usize>,
}

impl ByPosition {
    /// From a layer's configuration; `None` if positions do not matter.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Turns`] if runs are of 0 tokens or more than an i32 counts, or the scores are added to the
    /// logits.
    pub(super) fn try_new(
        selection: &Selection,
        scores: Scores,
        causal: bool,
        kv_heads: usize,
        device: &Device,
    ) -> Result<Option<Self>, AttentionError> {
        let turns = selection.turns;
        let ranks = scores == Scores::Ranking;
        if let Some(run) = turns
            && !(run > 0 && i32::try_from(run).is_ok() && ranks)
        {
            return Err(AttentionError::Turns { run });
        }
        let prefers = (selection.recency && ranks && causal && kv_heads > 1).then(|| {
            let of_heads: Vec<f32> = (0..kv_heads).map(|head| (1 - head % 2) as f32).collect();
            Tensor::<1>::from_floats(of_heads.as_slice(), device).reshape([1, kv_heads, 1])
        });
        Ok((prefers.is_some() || turns.is_some()).then_some(Self { prefers, turns }))
    }

    /// Adds the position-dependent part to scores `[batch, kv_heads, len]`. `window` is `None` if the scores rank
    /// nothing.
    pub(super) fn added(
        &self,
        scores: Tensor<3>,
        first: First<'_>,
        window: Option<usize>,
    ) -> Tensor<3> {
        let [batch, heads, len] = scores.dims();
        let prefers = self.prefers.as_ref().zip(window);
        if batch * heads * len == 0 || (prefers.is_none() && self.turns.is_none()) {
            return scores;
        }
        let device = scores.device();
        let positions = match first {
            First::At(first) => in_a_row(first, len, &device),
            First::OnDevice(firsts) if firsts.dims() == [batch] => {
                let firsts = firsts.clone().reshape([batch, 1, 1]);
                match len {
                    1 => firsts,
                    _ => firsts + in_a_row(0, len, &device),
                }
            }
            // The cache refuses a step of another batch.
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
        match prefers {
            Some((prefers, window)) => {
                let windows = positions.cast(FloatDType::F32) * (1.0 / window as f32);
                scores + windows * prefers.clone()
            }
            None => scores,
        }
    }
}

fn in_a_row(first: usize, len: usize, device: &Device) -> Tensor<3, Int> {
    let positions = first as i64..(first + len) as i64;
    arange(positions, (device, DType::I32)).reshape([1, 1, len])
}

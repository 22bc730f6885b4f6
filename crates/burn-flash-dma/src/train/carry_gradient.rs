//! Gradients that later parts of a sequence give to the keys of earlier ones.

use super::checkpointing::resumed;
use crate::functions::scores::weighted_tokens;
use crate::functions::selector::row_sums;
use crate::nn::{DynamicMaskAttention, PartPass};
use burn::tensor::{FloatDType, Tensor};
use flash_dma_problem::AttentionError;

/// Gradients of rows, in f32, `[batch, kv_heads, rows, ..]`.
pub(super) struct CarryGradient {
    /// Of keys and values.
    pub rows: [Tensor<4>; 2],
    /// Of the ranks, and the positions at which these learn, `[.., 2]`.
    pub ranks: Tensor<4>,
    /// Of this part and all later ones; `None` if ranks do not compete.
    pub charge: Option<Charge>,
}

/// Sums over the keys of a head, which ranks that compete are charged by.
pub(super) struct Charge {
    /// Of the gradients of ranks, `[batch, kv_heads, 1]`.
    gain: Tensor<3>,
    /// Of the positions at which a rank learns.
    positions: Tensor<3>,
    /// Of the tokens, each times its positions: `[batch, kv_heads, d_model]`.
    tokens: Tensor<3>,
}

impl CarryGradient {
    /// Of the rows that a pass leaves, as one of all its keys, those of its carry first.
    pub fn of_keys(self, pass: &PartPass) -> Self {
        let live = pass.selection.live();
        Self {
            rows: self.rows.map(|rows| live.asked_of_keys(rows)),
            ranks: live.asked_of_keys(self.ranks),
            charge: self.charge,
        }
    }

    /// Of all keys: the gradient of a part's own keys (`at` 0) or values (1), in the type of these `rows`.
    pub fn of_part(&self, at: usize, rows: &Tensor<4>) -> Tensor<4> {
        let ([_, _, all, _], [_, _, len, _]) = (self.rows[at].dims(), rows.dims());
        let own = self.rows[at].clone().narrow(2, all - len, len);
        own.cast(rows.dtype())
    }
}

impl Charge {
    pub fn map(self, map: impl Fn(Tensor<3>) -> Tensor<3>) -> Self {
        Self {
            gain: map(self.gain),
            positions: map(self.positions),
            tokens: map(self.tokens),
        }
    }

    pub fn sums(gain: Tensor<3>, positions: Tensor<3>, tokens: &Tensor<3>) -> Self {
        Self {
            gain,
            tokens: weighted_tokens(tokens, &positions),
            positions: row_sums(positions),
        }
    }

    pub fn plus(self, other: Self) -> Self {
        Self {
            gain: self.gain + other.gain,
            positions: self.positions + other.positions,
            tokens: self.tokens + other.tokens,
        }
    }

    /// A zero whose backward pass takes it from the gradients of the parameters of the layer's scores; `None` if they are frozen.
    pub fn of(&self, layer: &DynamicMaskAttention) -> Result<Option<Tensor<1>>, AttentionError> {
        // The scores are linear in the tokens: that of a sum is the sum of theirs.
        let scores = layer.try_projected_scores(self.tokens.clone())?;
        let [_, heads, _] = scores.dims();
        let none = self.positions.clone().equal_elem(0);
        let share = self.gain.clone() / self.positions.clone().mask_fill(none, 1);
        let own_head = Tensor::<2>::eye(heads, &share.device());
        let own_head = own_head.cast(FloatDType::F32).unsqueeze::<3>();
        let zero = resumed(scores, own_head * share * -1);
        Ok(Some(zero).filter(Tensor::is_tracked))
    }
}

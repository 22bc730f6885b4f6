//! What makes the scores of a layer.

use crate::fallback::tensors::at_least_f32;
use crate::functions::scores::{try_biased_zoh_scores, try_linear_scores, try_products};
use crate::validate::at_least_zero;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole};
use serde::{Deserialize, Serialize};

/// Where the projections that scores are made with start, unless the configuration says otherwise.
const INITIAL: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// Added to the square of a projection's length, so that the gradient of one of zeros is finite.
const LEAST_SQUARE: f32 = 1e-12;

/// The form of a layer's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScoreForm {
    /// The paper's: `exp(a * softplus(v_cat . dt_projᵀ + dt_bias))` of the values of all key/value heads of a token. See
    /// [`zoh_scores`](crate::zoh_scores()).
    Zoh,
    /// `10 * (x . score_proj)` of the tensor that the layer gets, which its block has normalised. See
    /// [`linear_scores`](crate::linear_scores()). Of scores that only rank ([`ScoreRole::Rank`]) the direction of the
    /// projection counts alone: `x . score_proj / |score_proj|` per head, which ranks the keys alike.
    Linear,
}

impl ScoreForm {
    /// What scores of this form are for unless the configuration says otherwise.
    pub(super) fn role(self) -> ScoreRole {
        match self {
            Self::Linear => ScoreRole::Rank,
            Self::Zoh => ScoreRole::RankAndBias,
        }
    }
}

/// The parameters of a layer's scores, of either form.
#[derive(Module, Debug)]
pub enum Scorer {
    /// The parameters of [`ScoreForm::Zoh`].
    Zoh(ZohScorer),
    /// The parameters of [`ScoreForm::Linear`].
    Linear(LinearScorer),
}

/// The parameters of [`ScoreForm::Zoh`].
///
/// # Initialisation
///
/// `a` of kv head `h` of `H` starts at `-(h + 1) / H`, and `dt_proj` normal with standard deviation 0.02, unless the
/// configuration has a `score_initializer`: the scores differ from the first step, and stay in `(0, 1)`, near plain
/// attention. (With `a = 0`, a common choice, all keys tie, the window keeps the *first* ones, and no gradient reaches
/// `dt_proj` until `a` has moved.) Either may change sign in training.
#[derive(Module, Debug)]
pub struct ZohScorer {
    /// Projects the values of a token to the step of each key/value head: `[n_kv_heads, n_kv_heads *
    /// head_dim]`.
    pub dt_proj: Param<Tensor<2>>,
    /// Added to the steps before the softplus: `[n_kv_heads]`, which starts at zero. Only in a layer with biases.
    pub dt_bias: Option<Param<Tensor<1>>>,
    /// The decay of each key/value head: `[n_kv_heads]`.
    pub a: Param<Tensor<1>>,
}

/// The parameters of [`ScoreForm::Linear`].
#[derive(Module, Debug)]
pub struct LinearScorer {
    /// Projects a token to the score of each key/value head: `[d_model, n_kv_heads]`. It starts normal with standard
    /// deviation 0.02, unless the configuration has a `score_initializer`.
    pub score_proj: Param<Tensor<2>>,
}

impl Scorer {
    /// New parameters of a form, with a bias of the steps of each key/value head, which linear scores have none of.
    pub(super) fn new(
        form: ScoreForm,
        initializer: &Option<Initializer>,
        [d_model, kv_heads, head_dim]: [usize; 3],
        bias: bool,
        device: &Device,
    ) -> Self {
        let initializer = initializer.as_ref().unwrap_or(&INITIAL);
        match form {
            ScoreForm::Zoh => {
                let decay = (1..=kv_heads).map(|nth| -(nth as f32) / kv_heads as f32);
                let decay: Vec<f32> = decay.collect();
                Self::Zoh(ZohScorer {
                    dt_proj: initializer.init([kv_heads, kv_heads * head_dim], device),
                    dt_bias: bias.then(|| Initializer::Zeros.init([kv_heads], device)),
                    a: Param::from_tensor(Tensor::from_floats(decay.as_slice(), device)),
                })
            }
            ScoreForm::Linear => Self::Linear(LinearScorer {
                score_proj: initializer.init([d_model, kv_heads], device),
            }),
        }
    }

    /// Which form it is.
    #[must_use]
    pub fn form(&self) -> ScoreForm {
        match self {
            Self::Zoh(_) => ScoreForm::Zoh,
            Self::Linear(_) => ScoreForm::Linear,
        }
    }

    /// The scores `[batch, kv_heads, len]`, f32, of tokens `[batch, len, d_model]` or of their values
    /// `[batch, kv_heads, len, head_dim]`, each made only for the form that reads it.
    pub(super) fn scores(
        &self,
        role: ScoreRole,
        tokens: impl FnOnce() -> Tensor<3>,
        values: impl FnOnce() -> Result<Tensor<4>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        match self {
            Self::Zoh(zoh) => {
                let bias = zoh.dt_bias.as_ref().map(Param::val);
                try_biased_zoh_scores(values()?, zoh.dt_proj.val(), bias, zoh.a.val())
            }
            Self::Linear(linear) => {
                let projection = linear.score_proj.val();
                match role {
                    ScoreRole::RankAndBias => try_linear_scores(tokens(), projection),
                    ScoreRole::Rank => try_products(tokens(), directions(projection)),
                }
            }
        }
    }
}

/// The directions of a projection's columns, one per head, as unit vectors: nothing would hold back the length of a column
/// whose scores only rank, and what a token learns from them, in proportion to it, would drown what the loss says.
fn directions(projection: Tensor<2>) -> Tensor<2> {
    let projection = at_least_f32(projection);
    let lengths = (projection.clone().square().sum_dim(0) + LEAST_SQUARE).sqrt();
    projection / lengths
}

/// A factor on the gradient that passes through a tensor, which stays as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct GradientScale(f32);

impl GradientScale {
    /// # Errors
    ///
    /// [`AttentionError::GradientScale`] if it is negative or, as f32, not finite.
    pub(super) fn try_new(scale: f64) -> Result<Self, AttentionError> {
        let factor = at_least_zero(scale).ok_or(AttentionError::GradientScale { scale })?;
        Ok(Self(factor))
    }

    /// The tensor, whose gradient is this times that of the result.
    pub(super) fn applied<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if self.0 == 1.0 || !x.device().is_autodiff() {
            return x;
        }
        let value = x.clone().detach();
        if self.0 == 0.0 {
            return value;
        }
        // The difference is 0 whatever the type, so that no rounding can change a selection.
        (x - value.clone()) * self.0 + value
    }
}

//! What makes the scores of a layer.

use crate::fallback::tensors::{at_least_f32, constant};
use crate::functions::scores::{try_biased_zoh_scores, try_linear_scores, try_products};
use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole};
use serde::{Deserialize, Serialize};

/// Where the projections that scores are made with start.
const INITIAL: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// Added to the square of a projection's length, so that the gradient of one of zeros is finite.
const LEAST_SQUARE: f32 = 1e-12;

/// Kind of a layer's scores: how they are made, and whether they do more than rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scores {
    /// They rank the keys and do nothing else: `x . score_proj / |score_proj|` per key/value head, of the tensor that the
    /// layer gets, which its block has normalised. They learn as [`ScoreLearning`](super::ScoreLearning) says, and nothing where every key is
    /// kept.
    #[default]
    Ranking,
    /// Dynamic Mask Attention's own, added to the logits as well: `exp(a * softplus(v_cat . dt_projᵀ +
    /// dt_bias))` of the values of all key/value heads of a token. See [`zoh_scores`](crate::zoh_scores()).
    Dma,
    /// `10 * (x . score_proj)`, added to the logits as well. See [`linear_scores`](crate::linear_scores()).
    Added,
}

impl Scores {
    /// Their role in attention.
    #[must_use]
    pub fn role(self) -> ScoreRole {
        match self {
            Self::Ranking => ScoreRole::Rank,
            Self::Dma | Self::Added => ScoreRole::RankAndBias,
        }
    }
}

/// The parts of a layer that learn through its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learns {
    /// Nothing: the scores are constants. A graph of them that no loss reaches and that nothing but parameters is part of
    /// would stay in memory: Burn frees a graph behind the backward pass of one of its nodes.
    Nothing,
    /// The parameters of the scores.
    Projection,
    /// These, and the tokens, or their values.
    Tokens,
}

impl Learns {
    fn of_tokens<const D: usize>(self, tokens: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Tokens => tokens,
            Self::Projection => tokens.detach(),
            Self::Nothing => constant(tokens),
        }
    }

    /// Tokens of linear scores: in f32 where the projection alone learns, of which no copy is kept for the backward pass.
    fn of_wide_tokens(self, tokens: Tensor<3>) -> Tensor<3> {
        match (self, tokens.dtype()) {
            (Self::Projection, DType::F16 | DType::BF16) => {
                Tensor::from_dispatch(Dispatch::training_widen(tokens.into_dispatch(), false))
            }
            _ => self.of_tokens(tokens),
        }
    }

    fn of_projection<const D: usize>(self, projection: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Tokens | Self::Projection => projection,
            Self::Nothing => constant(projection),
        }
    }
}

/// The parameters of a layer's scores.
#[derive(Module, Debug)]
pub enum Scorer {
    /// Parameters of [`Scores::Dma`].
    Zoh(ZohScorer),
    /// Parameters of [`Scores::Ranking`] and [`Scores::Added`].
    Linear(LinearScorer),
}

/// The parameters of [`Scores::Dma`].
///
/// # Initialisation
///
/// `a` of kv head `h` of `H` starts at `-(h + 1) / H`, and `dt_proj` normal with standard deviation 0.02: the scores differ from the first step, and stay in `(0, 1)`, near plain
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

/// The parameters of [`Scores::Ranking`] and [`Scores::Added`].
#[derive(Module, Debug)]
pub struct LinearScorer {
    /// Projects a token to the score of each key/value head: `[d_model, n_kv_heads]`. It starts normal with standard
    /// deviation 0.02.
    pub score_proj: Param<Tensor<2>>,
}

impl Scorer {
    /// New parameters, with a bias of the steps of each key/value head, which linear scores have none of.
    pub(super) fn new(
        scores: Scores,
        [d_model, kv_heads, head_dim]: [usize; 3],
        bias: bool,
        device: &Device,
    ) -> Self {
        match scores {
            Scores::Dma => {
                let decay = (1..=kv_heads).map(|nth| -(nth as f32) / kv_heads as f32);
                let decay: Vec<f32> = decay.collect();
                Self::Zoh(ZohScorer {
                    dt_proj: INITIAL.init([kv_heads, kv_heads * head_dim], device),
                    dt_bias: bias.then(|| Initializer::Zeros.init([kv_heads], device)),
                    a: Param::from_tensor(Tensor::from_floats(decay.as_slice(), device)),
                })
            }
            Scores::Ranking | Scores::Added => Self::Linear(LinearScorer {
                score_proj: INITIAL.init([d_model, kv_heads], device),
            }),
        }
    }

    /// The scores `[batch, kv_heads, len]`, f32, of tokens `[batch, len, d_model]` or of their values
    /// `[batch, kv_heads, len, head_dim]`, each made only for the form that reads it.
    pub(super) fn scores(
        &self,
        role: ScoreRole,
        learns: Learns,
        tokens: impl FnOnce() -> Tensor<3>,
        values: impl FnOnce() -> Result<Tensor<4>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        match self {
            Self::Zoh(zoh) => {
                let bias = zoh.dt_bias.as_ref().map(Param::val);
                let values = learns.of_tokens(values()?);
                try_biased_zoh_scores(values, zoh.dt_proj.val(), bias, zoh.a.val())
            }
            Self::Linear(linear) => {
                let tokens = learns.of_wide_tokens(tokens());
                let projection = learns.of_projection(linear.score_proj.val());
                match role {
                    ScoreRole::RankAndBias => try_linear_scores(tokens, projection),
                    ScoreRole::Rank => try_products(tokens, directions(projection)),
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

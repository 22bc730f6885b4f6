//! The parameters and the computation of a layer's scores.

use crate::fallback::tensors::{at_least_f32, constant, greatest_divisor};
use crate::functions::norm::try_rms_norm;
use crate::functions::scores::{try_added_scores, try_biased_zoh_scores, try_scores};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole};
use serde::{Deserialize, Serialize};

const INITIAL: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// Added to the square of a projection's length, so that the gradient of a zero projection is finite.
const LEAST_SQUARE: f32 = 1e-12;

/// Kind of a layer's scores: how they are computed, and whether they only rank keys or are added to the logits too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scores {
    /// Only rank: `x . score_proj / |score_proj|` per key/value head, where `x` is the layer's (normalised) input.
    /// They learn as [`ScoreLearning`](super::ScoreLearning) says, and not at all without a window.
    #[default]
    Ranking,
    /// Dynamic Mask Attention's scores, also added to the logits: `exp(a * softplus(v_cat . dt_projᵀ + dt_bias))`,
    /// with the values of all key/value heads of a token. See [`zoh_scores`](crate::zoh_scores()).
    Dma,
    /// `10 * (x . score_proj)`, also added to the logits. See [`linear_scores`](crate::linear_scores()).
    Added,
}

impl Scores {
    /// Role of these scores in attention.
    #[must_use]
    pub fn role(self) -> ScoreRole {
        match self {
            Self::Ranking => ScoreRole::Rank,
            Self::Dma | Self::Added => ScoreRole::RankAndBias,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learns {
    /// Nothing: the scores are constants. Otherwise their graph would stay in memory if it has only parameters and no
    /// loss reaches it, as Burn frees a graph only after a backward pass of one of its nodes.
    Nothing,
    /// The parameters of the scores.
    Projection,
    /// The parameters, and the tokens or their values.
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

    fn of_projection<const D: usize>(self, projection: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Tokens | Self::Projection => projection,
            Self::Nothing => constant(projection),
        }
    }
}

/// Parameters of a layer's scores.
#[derive(Module, Debug)]
pub enum Scorer {
    /// Parameters of [`Scores::Dma`].
    Zoh(ZohScorer),
    /// Parameters of [`Scores::Ranking`] and [`Scores::Added`].
    Linear(LinearScorer),
}

/// Parameters of [`Scores::Dma`].
///
/// # Initialisation
///
/// `a` of kv head `h` of `H` starts at `-(h + 1) / H`, and `dt_proj` normal with standard deviation 0.02: the scores
/// differ from the first step, and stay in `(0, 1)`, near plain attention. (With `a = 0`, a common choice, all keys
/// tie, the window keeps the *first* ones, and no gradient reaches `dt_proj` until `a` has moved.) Either may change
/// sign in training.
#[derive(Module, Debug)]
pub struct ZohScorer {
    /// Projects the values of a token to the step of each key/value head: `[n_kv_heads, n_kv_heads * head_dim]`.
    pub dt_proj: Param<Tensor<2>>,
    /// Bias of the steps, before the softplus: `[n_kv_heads]`, initialised to zero. Only in a layer with biases.
    pub dt_bias: Option<Param<Tensor<1>>>,
    /// Decay of each key/value head: `[n_kv_heads]`.
    pub a: Param<Tensor<1>>,
}

/// Parameters of [`Scores::Ranking`] and [`Scores::Added`].
#[derive(Module, Debug)]
pub struct LinearScorer {
    /// Projects a token to the score of each key/value head: `[d_model, n_kv_heads]`. Initialised normal with
    /// standard deviation 0.02.
    pub score_proj: Param<Tensor<2>>,
}

impl Scorer {
    /// New parameters. `bias` adds a bias to the steps of DMA's scores; linear scores have none.
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

    /// Scores `[batch, kv_heads, len]`, f32, of tokens `[batch, len, d_model]` or of their values `[batch, kv_heads,
    /// len, head_dim]`; each is made only for the kind that reads it.
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
                let projection = learns.of_projection(linear.score_proj.val());
                let (tokens, tokens_learn) = match learns {
                    Learns::Tokens => (tokens(), true),
                    Learns::Projection => (tokens(), false),
                    Learns::Nothing => (constant(tokens()), false),
                };
                match role {
                    ScoreRole::Rank => try_scores(tokens, directions(projection), tokens_learn),
                    ScoreRole::RankAndBias => try_added_scores(tokens, projection, tokens_learn),
                }
            }
        }
    }
}

/// Columns of a projection (one per head) as unit vectors. If scores only rank, nothing bounds the length of a
/// column, and the gradient of the tokens, which is proportional to it, would drown that of the loss.
fn directions(projection: Tensor<2>) -> Tensor<2> {
    let [d_model, heads] = projection.dims();
    if d_model == 0 {
        return at_least_f32(projection);
    }
    let projection = at_least_f32(projection);
    // The norm of rows takes one launch in each direction.
    let rows = projection.clone().transpose();
    let options = (&projection.device().without_autodiff(), projection.dtype());
    let gamma = Tensor::full([d_model], (d_model as f64).powf(-0.5), options);
    if let Ok(rows) = try_rms_norm(rows, gamma, LEAST_SQUARE / d_model as f32) {
        return rows.transpose();
    }
    // A column that is too long for it. Sums within parts and then over them, here and in the gradient: as one sum each column
    // would be a single thread's work.
    let parts = greatest_divisor(d_model, d_model.isqrt());
    let length = d_model / parts;
    let projection = projection.reshape([parts, length, heads]);
    let squares = projection.clone().square().sum_dim(0).sum_dim(1);
    let lengths = (squares + LEAST_SQUARE).sqrt().expand([1, length, heads]);
    (projection / lengths).reshape([d_model, heads])
}

#[cfg(all(test, feature = "flex", feature = "autodiff"))]
mod tests {
    use super::*;
    use burn::tensor::{Distribution, TensorData};

    /// Of a length that the norm of rows takes, and of a greater one: the directions, and the gradient of their sum.
    #[test]
    fn directions_have_length_1_and_a_gradient_across_them() {
        let device = Device::flex().autodiff();
        for d_model in [1, 5, 64, 9000] {
            let drawn = Tensor::<2>::random([d_model, 2], Distribution::Default, &device);
            // A column of zeros has no direction.
            let zeros = Tensor::<2>::zeros([d_model, 1], &device);
            let projection = Tensor::cat(vec![drawn, zeros], 1).detach().require_grad();
            let out = directions(projection.clone());
            let grads = out.clone().sum().backward();
            let numbers = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
            let gradient = numbers(projection.grad(&grads).unwrap().into_data());
            let (x, out) = (numbers(projection.into_data()), numbers(out.into_data()));
            for column in 0..3 {
                let of = |all: &[f64]| -> Vec<f64> {
                    all.iter().skip(column).step_by(3).copied().collect()
                };
                let (x, out, gradient) = (of(&x), of(&out), of(&gradient));
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
                let along = out.iter().sum::<f64>();
                for ((x, out), gradient) in x.iter().zip(&out).zip(gradient) {
                    let exact = x / length;
                    assert!((out - exact).abs() <= 1e-6, "{d_model}: {out}, not {exact}");
                    let exact = (1.0 - exact * along) / length;
                    let error = (gradient - exact).abs();
                    assert!(
                        error <= 2e-6 * (1.0 + along) / length,
                        "{d_model}: {gradient}, not {exact}"
                    );
                }
            }
        }
    }
}

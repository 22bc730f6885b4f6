//! Many experts of one hidden feature each, found by product keys.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::{AttentionError, try_linear};
use serde::{Deserialize, Serialize};

/// Which of the router's logits belong to a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Routing {
    /// Its own: the routing of a token depends on nothing else.
    #[default]
    PerToken,
    /// The routing of `transformers` for a call of several tokens, to compare with it: it reads the two halves of the
    /// logits of `n` tokens as if all first halves preceded all second ones. The logits of a token then belong to
    /// others, *later ones included*, and depend on how a text is divided into calls. For one token, as in
    /// `transformers`' generation after the prompt, it equals [`PerToken`](Self::PerToken).
    AcrossTokens,
}

/// Configuration of [`Experts`].
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Number of experts. Those past the largest square up to it are never chosen.
    pub experts: usize,
    /// Number of experts per token, at most the number that can be chosen.
    pub per_token: usize,
    /// Which of the router's logits belong to a token. Default: its own.
    #[config(default = "Routing::PerToken")]
    pub routing: Routing,
}

/// A cross-domain mixture of experts: each expert is one row of `down` and one of `up`, and the `per_token` experts
/// of greatest logit add `softmax(logit) * silu(x . down) * up`.
///
/// With `keys` the square root of the number of experts, the router gives a token `2 * keys` logits. The logit of
/// expert `i * keys + j` is number `i` of the first half plus number `j` of the second, so the best experts are among
/// the pairs of the best of each half.
#[derive(Module, Debug)]
pub struct Experts {
    /// `[d_model, 2 * keys]`, without bias.
    pub router: Linear,
    /// Input weights of the experts: `[experts, d_model]`.
    pub down: Param<Tensor<2>>,
    /// Output weights of the experts: `[experts, d_model]`.
    pub up: Param<Tensor<2>>,
    keys: usize,
    per_token: usize,
    #[module(skip)]
    routing: Routing,
}

impl ExpertsConfig {
    /// Number of logits of each half: the square root of the number of experts, rounded down.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.experts.isqrt()
    }

    /// Creates the experts for `d_model` features per token.
    #[must_use]
    pub fn init(&self, d_model: usize, initializer: &Initializer, device: &Device) -> Experts {
        let table = || initializer.init([self.experts, d_model], device);
        Experts {
            router: LinearConfig::new(d_model, 2 * self.keys())
                .with_bias(false)
                .with_initializer(initializer.clone())
                .init(device),
            down: table(),
            up: table(),
            keys: self.keys(),
            per_token: self.per_token,
            routing: self.routing,
        }
    }
}

impl Experts {
    /// Contribution of the experts: `[batch, len, d_model]` to the same shape.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_model`, the device or the element types do not fit, or a token
    /// goes to more experts than can be chosen.
    pub fn try_forward(&self, x: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        let shape @ [batch, len, d_model] = x.dims();
        let (tokens, limit) = (batch * len, self.keys * self.keys);
        if self.per_token > limit {
            return Err(AttentionError::TooLarge {
                what: "the number of experts of a token",
                size: self.per_token,
                limit,
            });
        }
        if tokens * self.per_token == 0 {
            return Ok(x.zeros_like());
        }
        let logits = try_linear(&self.router, x.clone())?;
        let (scores, experts) = self.best(logits.reshape([tokens, 2 * self.keys]));
        let weights = softmax(scores, 1);

        let (chosen, dtype) = (experts.flatten::<1>(0, 1), x.dtype());
        let rows = |table: &Param<Tensor<2>>| {
            let rows = table.val().select(0, chosen.clone()).cast(dtype);
            rows.reshape([tokens, self.per_token, d_model])
        };
        let read = rows(&self.down).matmul(x.reshape([tokens, d_model, 1]));
        let weights = silu(read.reshape([tokens, self.per_token])) * weights;
        let out = (weights.reshape([tokens, 1, self.per_token])).matmul(rows(&self.up));
        Ok(out.reshape(shape))
    }

    /// Logits and indices of each token's best experts, `[tokens, per_token]`, from the router's logits `[tokens, 2 *
    /// keys]`.
    fn best(&self, logits: Tensor<2>) -> (Tensor<2>, Tensor<2, Int>) {
        let [tokens, _] = logits.dims();
        let keys = self.keys;
        let halves = match self.routing {
            Routing::PerToken => [0, keys].map(|start| logits.clone().narrow(1, start, keys)),
            Routing::AcrossTokens => {
                let rows = logits.reshape([2 * tokens, keys]);
                [0, tokens].map(|start| rows.clone().narrow(0, start, tokens))
            }
        };
        // The best pairs consist of the best of each half.
        let kept = self.per_token.min(keys);
        let [(first, i), (second, j)] = halves.map(|half| greatest(half, kept));
        let pairs: Tensor<3> = first.unsqueeze_dim::<3>(2) + second.unsqueeze_dim::<3>(1);
        let (scores, places) = greatest(pairs.reshape([tokens, kept * kept]), self.per_token);
        let i = i.gather(1, places.clone().div_scalar(kept as i64));
        let j = j.gather(1, places.remainder_scalar(kept as i64));
        (scores, i.mul_scalar(keys as i64) + j)
    }

    /// Sets which of the router's logits belong to a token.
    pub fn set_routing(&mut self, routing: Routing) {
        self.routing = routing;
    }
}

/// Greatest values of each row and their columns. The choice is a constant for gradients; the values have theirs.
fn greatest(values: Tensor<2>, count: usize) -> (Tensor<2>, Tensor<2, Int>) {
    let (_, columns) = values.clone().detach().topk_with_indices(count, 1);
    (values.gather(1, columns.clone()), columns)
}

//! The gated feed-forward network.

use super::experts::{Experts, ExpertsConfig};
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::{AttentionError, try_linear, try_swiglu_linear};

/// Configuration of a [`FeedForward`].
#[derive(Config, Debug)]
pub struct FeedForwardConfig {
    /// Hidden features.
    pub hidden: usize,
    /// Adds biases to the three products. Default: false.
    #[config(default = false)]
    pub bias: bool,
    /// Routed experts next to the network. Default: none.
    pub experts: Option<ExpertsConfig>,
    /// Initialiser of the three products. Default: that of the block's attention.
    pub initializer: Option<Initializer>,
}

/// `down(silu(gate(x)) * up(x))`, plus the output of routed experts if any.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `[d_model, hidden]`.
    pub gate: Linear,
    /// `[d_model, hidden]`.
    pub up: Linear,
    /// `[hidden, d_model]`.
    pub down: Linear,
    /// Routed experts.
    pub experts: Option<Experts>,
}

impl FeedForwardConfig {
    /// Creates the network for `d_model` features per token.
    #[must_use]
    pub fn init(&self, d_model: usize, initializer: &Initializer, device: &Device) -> FeedForward {
        let initializer = self.initializer.as_ref().unwrap_or(initializer);
        let linear = |from, to| {
            LinearConfig::new(from, to)
                .with_bias(self.bias)
                .with_initializer(initializer.clone())
                .init(device)
        };
        FeedForward {
            gate: linear(d_model, self.hidden),
            up: linear(d_model, self.hidden),
            down: linear(self.hidden, d_model),
            experts: (self.experts.as_ref())
                .map(|experts| experts.init(d_model, initializer, device)),
        }
    }
}

impl FeedForward {
    /// The network on `[batch, len, d_model]`, to the same shape.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_model`, or the device or the element types do not fit.
    pub fn try_forward(&self, x: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        let gate = try_linear(&self.gate, x.clone())?;
        let up = try_linear(&self.up, x.clone())?;
        let out = try_swiglu_linear(gate, up, &self.down)?;
        Ok(match &self.experts {
            None => out,
            Some(experts) => out + experts.try_forward(x)?,
        })
    }
}

//! The configuration, in the form of Burn's.

use super::module::MultiHeadAttention;
use crate::nn::dropout::Seeds;
use crate::nn::heads::check_weights;
use crate::validate::check_shape;
use burn::config::Config;
use burn::module::Initializer;
use burn::nn::{DropoutConfig, LinearConfig};
use burn::tensor::Device;
use flash_dma_problem::{
    AttentionError, AttentionOptions, Dropout, ElementType, Problem, TensorName,
};

/// Configuration of [`MultiHeadAttention`]: the fields and defaults of Burn's, whose files it reads.
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Features per token.
    pub d_model: usize,
    /// Number of heads. Each has `d_model / n_heads` features, a multiple of 8 up to 256.
    pub n_heads: usize,
    /// The share of the weights that dropout removes in training. Default: 0.1, as Burn's.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Read and written for Burn's files, and not used: a hidden key has weight 0.
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Softmax with one more logit of 0 in its denominator, so that a head may attend to nothing. Default: false.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Initialiser of the four projections. Default: Kaiming uniform, as Burn's.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Whether the projection of keys has a bias. Default: true.
    #[config(default = true)]
    pub key_bias: bool,
    /// Whether the projection of values has a bias. Default: true.
    #[config(default = true)]
    pub value_bias: bool,
    /// Whether the projection of queries has a bias. Default: true.
    #[config(default = true)]
    pub query_bias: bool,
    /// Whether the last projection has a bias. Default: true.
    #[config(default = true)]
    pub output_bias: bool,
}

impl MultiHeadAttentionConfig {
    twin! {
        /// Makes the module on a device.
        pub fn init(&self, device: &Device) -> MultiHeadAttention = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::HeadRatio`] without heads, [`AttentionError::HeadDim`], [`AttentionError::Shape`] if `d_model` is
    /// not a multiple of `n_heads`, or [`AttentionError::DropoutRate`].
    pub fn try_init(&self, device: &Device) -> Result<MultiHeadAttention, AttentionError> {
        check_heads(self.d_model, self.n_heads)?;
        let rate = self.dropout as f32;
        Dropout::new(rate, 0)?;
        // Burn's layer holds it in f64, where less than 0 may still be 0 in f32.
        if self.dropout < 0.0 {
            return Err(AttentionError::DropoutRate { rate });
        }
        let linear = LinearConfig::new(self.d_model, self.d_model)
            .with_initializer(self.initializer.clone());
        let linear = |bias| linear.clone().with_bias(bias).init(device);
        Ok(MultiHeadAttention {
            query: linear(self.query_bias),
            key: linear(self.key_bias),
            value: linear(self.value_bias),
            output: linear(self.output_bias),
            dropout: DropoutConfig::new(self.dropout).init(),
            d_model: self.d_model,
            n_heads: self.n_heads,
            d_k: self.d_model / self.n_heads,
            quiet_softmax: self.quiet_softmax,
            seeds: Seeds::new(device),
        })
    }
}

/// Refuses heads that attention does not compute.
pub(super) fn check_heads(d_model: usize, n_heads: usize) -> Result<(), AttentionError> {
    let d_k = d_model / n_heads.max(1);
    // The rules for one token are those for any sequence.
    let rows = [1, n_heads, 1, d_k];
    let options = AttentionOptions::new();
    Problem::new(&rows, &rows, &rows, None, ElementType::F32, &options)?;
    let weight = [d_model, d_model];
    check_shape(TensorName::Weight, &weight, &[d_model, n_heads * d_k])?;
    check_weights(weight)
}

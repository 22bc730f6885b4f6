//! The module and its configuration, with the fields of Burn's.

use super::input::{Hidden, MhaInput};
use super::output::{Logits, MhaOutput};
use crate::functions::attention::Attention;
use crate::functions::masked::MaskedAttention;
use crate::functions::product::try_linear;
use crate::nn::dropout::Seeds;
use crate::nn::heads::{check_heads, check_weights, merge, split};
use crate::validate::{check_shape, element_type, same_device};
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{self, DropoutConfig, Linear, LinearConfig, attention as theirs};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, Dropout, TensorName};

/// Configuration of [`MultiHeadAttention`]: the fields and defaults of Burn's, whose files it reads.
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Features per token.
    pub d_model: usize,
    /// Number of heads. Each has `d_model / n_heads` features, a multiple of 8 up to 256.
    pub n_heads: usize,
    /// Probability of dropping a weight in training. Default: 0.1, as in Burn.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Read and written for Burn's files, and not used: a hidden key has weight 0.
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Adds a logit of 0 to the softmax, so that a head may attend to nothing. Default: false.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Initialiser of the four projections. Default: Kaiming uniform, as in Burn.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Adds a bias to the projection of keys. Default: true.
    #[config(default = true)]
    pub key_bias: bool,
    /// Adds a bias to the projection of values. Default: true.
    #[config(default = true)]
    pub value_bias: bool,
    /// Adds a bias to the projection of queries. Default: true.
    #[config(default = true)]
    pub query_bias: bool,
    /// Adds a bias to the output projection. Default: true.
    #[config(default = true)]
    pub output_bias: bool,
}

/// Drop-in for [Burn's multi-head attention](burn::nn::attention::MultiHeadAttention): the same parameters under the
/// same names, so that records of either load into the other, and the same results up to rounding. The [module's
/// page](super) has the differences.
///
/// Burn's module converts into this one by `try_into`.
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// Query projection, `[d_model, d_model]`.
    pub query: Linear,
    /// Key projection, `[d_model, d_model]`.
    pub key: Linear,
    /// Value projection, `[d_model, d_model]`.
    pub value: Linear,
    /// Output projection, `[d_model, d_model]`.
    pub output: Linear,
    /// Dropout of the weights, in training.
    pub dropout: nn::Dropout,
    /// Features per token.
    pub d_model: usize,
    /// Number of heads.
    pub n_heads: usize,
    /// Features per head.
    pub d_k: usize,
    /// True if the softmax has one more logit of 0.
    pub quiet_softmax: bool,
    #[module(skip)]
    seeds: Seeds,
}

impl MultiHeadAttentionConfig {
    twin! {
        /// Creates the module on a device.
        pub fn init(&self, device: &Device) -> MultiHeadAttention = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::HeadRatio`] without heads, [`AttentionError::HeadDim`], [`AttentionError::Shape`] if
    /// `d_model` is not a multiple of `n_heads`, or [`AttentionError::DropoutRate`].
    pub fn try_init(&self, device: &Device) -> Result<MultiHeadAttention, AttentionError> {
        check_sizes(self.d_model, self.n_heads)?;
        let rate = self.dropout as f32;
        Dropout::new(rate, 0)?;
        // Burn's layer holds the rate in f64; a small negative number could round to 0 in f32.
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

impl TryFrom<theirs::MultiHeadAttention> for MultiHeadAttention {
    type Error = AttentionError;

    /// # Errors
    ///
    /// [`AttentionError::HeadDim`] if its head dimension is not supported.
    fn try_from(layer: theirs::MultiHeadAttention) -> Result<Self, AttentionError> {
        check_sizes(layer.d_model, layer.n_heads)?;
        let seeds = Seeds::new(&layer.query.weight.lazy_device());
        Ok(Self {
            seeds,
            query: layer.query,
            key: layer.key,
            value: layer.value,
            output: layer.output,
            dropout: layer.dropout,
            d_model: layer.d_model,
            n_heads: layer.n_heads,
            d_k: layer.d_k,
            quiet_softmax: layer.quiet_softmax,
        })
    }
}

impl MultiHeadAttention {
    twin! {
        /// Attention of an input, with the results of Burn's module.
        pub fn forward(&self, input: MhaInput) -> MhaOutput = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, the element types or the devices of the tensors and the masks do not fit.
    pub fn try_forward(&self, input: MhaInput) -> Result<MhaOutput, AttentionError> {
        self.check(&input)?;
        let inputs = [
            (&self.query, input.query),
            (&self.key, input.key),
            (&self.value, input.value),
        ];
        let [q, k, v] = inputs.map(|(layer, tokens)| try_linear(layer, tokens));
        let rows = [q?, k?, v?].map(|rows| self.heads(rows));
        let (out, logits) = self.attend(rows, input.hidden)?;
        let context = merge(out, &self.output)?;
        Ok(MhaOutput { context, logits })
    }

    pub(super) fn check(&self, input: &MhaInput) -> Result<(), AttentionError> {
        let [batch, q_len, _] = input.query.dims();
        let [_, k_len, _] = input.key.dims();
        let device = input.query.device();
        for (name, tensor, len) in [
            (TensorName::Query, &input.query, q_len),
            (TensorName::Key, &input.key, k_len),
            (TensorName::Value, &input.value, k_len),
        ] {
            check_shape(name, &tensor.dims(), &[batch, len, self.d_model])?;
            same_device(&device, name, tensor.device())?;
            element_type(name, tensor)?;
        }
        let of = |actual: usize| if actual == 1 { 1 } else { batch };
        if let Some(pad) = &input.hidden.pad {
            let shape @ [sequences, _] = pad.dims();
            check_shape(TensorName::Mask, &shape, &[of(sequences), k_len])?;
            same_device(&device, TensorName::Mask, pad.device())?;
        }
        if let Some(attn) = &input.hidden.attn {
            let shape @ [sequences, _, _] = attn.dims();
            check_shape(TensorName::Mask, &shape, &[of(sequences), q_len, k_len])?;
            same_device(&device, TensorName::Mask, attn.device())?;
        }
        Ok(())
    }

    /// `[batch, len, d_model]` to `[batch, n_heads, len, d_k]`.
    pub(super) fn heads(&self, rows: Tensor<3>) -> Tensor<4> {
        split(rows, self.n_heads).swap_dims(1, 2)
    }

    /// Output of the heads, `[batch, n_heads, q_len, d_k]`, and the parts that the weights are made of.
    pub(super) fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        hidden: Hidden,
    ) -> Result<(Tensor<4>, Logits), AttentionError> {
        // Burn's layer decides it the same way.
        let training = self.dropout.training.is_enabled() && q.device().is_autodiff();
        let dropout = (training && self.dropout.prob > 0.0)
            .then(|| Dropout::new(self.dropout.prob as f32, self.seeds.draw()))
            .transpose()?;
        let logits = Logits {
            q: q.clone(),
            k: k.clone(),
            hidden,
            quiet: self.quiet_softmax,
            dropout,
        };
        let options = AttentionOptions::new().with_causal(logits.hidden.causal);
        let options = options.with_dropout(dropout);
        let out = match (logits.hidden.mask(), self.quiet_softmax) {
            (None, false) => Attention::new(q, k, v).options(options).try_forward()?,
            (None, true) => {
                let call = Attention::new(q, k, v).options(options);
                quiet(call.try_forward_with_lse()?)
            }
            (mask, of_quiet) => {
                let call = MaskedAttention::new(q, k, v).mask(mask).options(options);
                match of_quiet {
                    false => call.try_forward()?,
                    true => quiet(call.try_forward_with_lse()?),
                }
            }
        };
        Ok((out, logits))
    }
}

fn check_sizes(d_model: usize, n_heads: usize) -> Result<(), AttentionError> {
    let d_k = d_model / n_heads.max(1);
    check_heads([n_heads; 2], d_k, false, &AttentionOptions::new())?;
    let weight = [d_model, d_model];
    check_shape(TensorName::Weight, &weight, &[d_model, n_heads * d_k])?;
    check_weights(weight)
}

/// Adds a logit of 0 to a softmax: scales the output by `exp(lse) / (1 + exp(lse))`.
fn quiet((out, lse): (Tensor<4>, Tensor<3>)) -> Tensor<4> {
    let share = sigmoid(lse).cast(out.dtype());
    out * share.unsqueeze_dim(3)
}

//! An attention layer under a mask, a tile plan or a bias.

use super::config::{QkNorm, Rope};
use super::heads::{
    check_heads, check_positions, check_type, check_weights, encode, linears, merge, norms,
    project, rotary,
};
use crate::functions::masked::{Mask, MaskedAttention};
use crate::mask::plan::TilePlan;
use crate::mask::polarity::AttentionMask;
use crate::validate::check_shape;
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, RmsNorm, RotaryEncoding};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AlibiSlopes, AttentionError, AttentionOptions, TensorName};

/// Configuration of [`MaskedAttentionLayer`].
#[derive(Config, Debug)]
pub struct MaskedAttentionLayerConfig {
    /// Features per token.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Features per head, a multiple of 8 up to 256. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// A query sees no key after itself, whatever the mask shows. A tile plan must agree. Default: true.
    #[config(default = true)]
    pub causal: bool,
    /// Rotary position encoding of q and k. Default: none.
    pub rope: Option<Rope>,
    /// RMS norm of each head of q and k, before the rotary encoding. Default: epsilon 1e-5.
    #[config(default = "QkNorm::default()")]
    pub qk_norm: QkNorm,
    /// Adds biases to the four projections. Default: false.
    #[config(default = false)]
    pub bias: bool,
    /// Factor on `q . k`. Default: `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// ALiBi slopes, one per query head. Default: none.
    pub alibi: Option<AlibiSlopes>,
    /// Initialiser of the four projections. Default: normal, mean 0, standard deviation 0.02.
    #[config(default = "Initializer::Normal{mean:0.0, std:0.02}")]
    pub initializer: Initializer,
}

/// Self-attention under any mask and any bias: [`MaskedAttention`](crate::MaskedAttention) between projections. Skips
/// blocks of keys that the mask hides.
///
/// `x -> q, k, v`; RMS norm per head and rotary encoding of q and k; masked attention; output projection. The
/// parameters are named as in [`DynamicMaskAttention`](super::DynamicMaskAttention).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::nn::{MaskedAttentionLayerConfig, MaskedInput};
/// use burn_flash_dma::{KeyRanges, TilePlan};
///
/// let device = Device::flex();
/// let layers = [0; 2].map(|_| MaskedAttentionLayerConfig::new(32, 4).init(&device));
/// // One plan of a sliding window for all layers.
/// let window = KeyRanges::sliding_window([100, 100], 20, &device);
/// let plan = TilePlan::from_ranges(window, [100, 100], true);
/// let mut x = Tensor::<3>::random([2, 100, 32], Distribution::Normal(0.0, 1.0), &device);
/// for layer in &layers {
///     x = layer.forward(MaskedInput::new(x).plan(&plan));
/// }
/// assert_eq!(x.dims(), [2, 100, 32]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct MaskedAttentionLayer {
    /// `[d_model, n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub k_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub v_proj: Linear,
    /// `[n_heads * head_dim, d_model]`.
    pub o_proj: Linear,
    /// Normalises the features of each head of q.
    pub q_norm: Option<RmsNorm>,
    /// Normalises the features of each head of k.
    pub k_norm: Option<RmsNorm>,
    /// Rotary encoding of q and k.
    pub rope: Option<RotaryEncoding>,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    options: AttentionOptions,
}

/// Input of [`MaskedAttentionLayer`]: tokens, optionally a mask or plan, and a bias. A plain tensor is an input
/// restricted by causal masking only.
#[derive(Clone, Debug)]
#[must_use = "a layer takes it"]
pub struct MaskedInput {
    x: Tensor<3>,
    mask: Option<Mask>,
    bias: Option<Tensor<4>>,
}

impl MaskedInput {
    /// Tokens `[batch, len, d_model]`.
    pub fn new(x: Tensor<3>) -> Self {
        Self {
            x,
            mask: None,
            bias: None,
        }
    }

    /// Which tokens each token sees, `[batch | 1, n_heads | n_kv_heads | 1, len | 1, len | 1]`. Replaces an earlier
    /// mask or plan. Every call cuts it into tiles.
    pub fn mask(mut self, mask: AttentionMask) -> Self {
        self.mask = Some(Mask::Tensor(mask));
        self
    }

    /// Which tokens each token sees, as a tile plan, which several layers can share. Replaces an earlier mask or
    /// plan.
    pub fn plan(mut self, plan: &TilePlan) -> Self {
        self.mask = Some(Mask::Plan(plan.clone()));
        self
    }

    /// Bias added to the logits, in the shapes of [`mask`](Self::mask); f32, f16 or bf16, differentiable.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }
}

impl From<Tensor<3>> for MaskedInput {
    fn from(x: Tensor<3>) -> Self {
        Self::new(x)
    }
}

impl MaskedAttentionLayerConfig {
    twin! {
        /// Creates the module on a device.
        pub fn init(&self, device: &Device) -> MaskedAttentionLayer = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the heads, the head dimension, the scale, the softcap, the ALiBi slopes, the epsilon of
    /// the norms or the rotary encoding are refused.
    pub fn try_init(&self, device: &Device) -> Result<MaskedAttentionLayer, AttentionError> {
        let head_dim = self.head_dim.unwrap_or(self.d_model / self.n_heads.max(1));
        let kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        let options = AttentionOptions {
            causal: self.causal,
            scale: self.scale,
            softcap: self.softcap,
            alibi: self.alibi,
            ..AttentionOptions::default()
        };
        check_heads([self.n_heads, kv_heads], head_dim, false, &options)?;
        check_weights([self.d_model, self.n_heads * head_dim])?;
        let [q_norm, k_norm] = norms(self.qk_norm, head_dim, device)?;
        let rope = rotary(&self.rope, head_dim, device)?;

        let linear = linears(self.bias, &self.initializer, device);
        let (q_width, kv_width) = (self.n_heads * head_dim, kv_heads * head_dim);
        Ok(MaskedAttentionLayer {
            q_proj: linear(self.d_model, q_width),
            k_proj: linear(self.d_model, kv_width),
            v_proj: linear(self.d_model, kv_width),
            o_proj: linear(q_width, self.d_model),
            q_norm,
            k_norm,
            rope,
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads: kv_heads,
            options,
        })
    }
}

impl MaskedAttentionLayer {
    twin! {
        /// Attention over a sequence, `[batch, len, d_model]` to the same shape. Takes a tensor or a [`MaskedInput`].
        /// A token that sees nothing gets zeros from attention.
        pub fn forward(&self, input: impl Into<MaskedInput>) -> Tensor<3> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_model`, the sequence is longer than the rotary encoding, or the
    /// mask, the plan or the bias does not fit.
    pub fn try_forward(&self, input: impl Into<MaskedInput>) -> Result<Tensor<3>, AttentionError> {
        let MaskedInput { x, mask, bias } = input.into();
        let shape @ [batch, len, _] = x.dims();
        check_shape(TensorName::Tokens, &shape, &[batch, len, self.d_model])?;
        check_type(&x, &self.q_norm)?;
        check_positions(&self.rope, len)?;
        let q = project(&self.q_proj, &x, self.n_heads)?;
        let q = encode(q, &self.q_norm, &self.rope, 0)?;
        let k = project(&self.k_proj, &x, self.n_kv_heads)?;
        let k = encode(k, &self.k_norm, &self.rope, 0)?;
        let v = project(&self.v_proj, &x, self.n_kv_heads)?.swap_dims(1, 2);
        let call = MaskedAttention::new(q, k, v).masked(mask).bias(bias);
        merge(call.options(self.options).try_forward()?, &self.o_proj)
    }

    /// Options of the layer's attention.
    #[must_use]
    pub fn options(&self) -> AttentionOptions {
        self.options
    }
}

//! The attention layer of Dynamic Mask Attention.

use crate::functions::shorthand::flash_dma_attention;
use crate::nn::rope::rotate;
use crate::validate::expect;
use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{
    Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem};

/// Configuration of [`DynamicMaskAttention`].
///
/// ```
/// # use burn_flash_dma::nn::DynamicMaskAttentionConfig;
/// let config = DynamicMaskAttentionConfig::new(256, 8)
///     .with_n_kv_heads(Some(2))
///     .with_keep_window(Some(512))
///     .with_max_seq_len(Some(2048));
/// assert_eq!(config.resolved_head_dim(), 32);
/// ```
#[derive(Config, Debug)]
pub struct DynamicMaskAttentionConfig {
    /// Features per token.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Features per head, a multiple of 8 up to 256. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// Number of keys that each query keeps. Default: all, that is dense attention with a bias per key.
    pub keep_window: Option<usize>,
    /// Whether a query sees only the keys up to itself. Default: true.
    #[config(default = true)]
    pub causal: bool,
    /// Rotary position encoding of q and k, for sequences up to this length. Default: none.
    pub max_seq_len: Option<usize>,
    /// Base of the rotary frequencies. Default: 10000.
    #[config(default = 10000.0)]
    pub rope_theta: f32,
    /// RMS normalisation of each head of q and k, before the rotary encoding. Default: true.
    #[config(default = true)]
    pub qk_norm: bool,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// Initialiser of the four projections. Default: normal, mean 0, standard deviation 0.02.
    #[config(default = "Initializer::Normal{mean:0.0, std:0.02}")]
    pub initializer: Initializer,
}

/// Self-attention whose heads each keep the keys that their learned scores rank highest.
///
/// `x -> q, k, v`; RMS norm per head and rotary encoding of q and k; scores `exp(a * softplus(v_cat
/// . dt_projᵀ))` from the values of all key/value heads of a token; dynamic-mask attention; output
/// projection. No biases, no dropout.
///
/// # Initialisation of the scores
///
/// `a = 0` (a common choice) makes every score 1: all keys tie, the window keeps the *first* keys of
/// the sequence, and as `d score / d dt = score * a * sigmoid(dt)` no gradient reaches `dt_proj`
/// until `a` has moved. Here `a` of kv head `h` of `H` starts at `-(h + 1) / H`, and `dt_proj` normal
/// with standard deviation 0.02: the scores differ from the first step and both parameters learn;
/// the heads start with different strengths; and a negative `a` bounds a score to (0, 1) whatever the
/// values are, so that training starts near plain attention and the exponential cannot overflow.
/// The initial sign does not last: `dt_proj` may reverse the ranking, and `a` is free to
/// become positive.
#[derive(Module, Debug)]
pub struct DynamicMaskAttention {
    /// `[d_model, n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub k_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub v_proj: Linear,
    /// `[n_heads * head_dim, d_model]`.
    pub o_proj: Linear,
    /// Projects the values of a token to the step of each key/value head: `[n_kv_heads, n_kv_heads *
    /// head_dim]`.
    pub dt_proj: Param<Tensor<2>>,
    /// The decay of each key/value head: `[n_kv_heads]`.
    pub a: Param<Tensor<1>>,
    /// Normalises the features of each head of q.
    pub q_norm: Option<RmsNorm>,
    /// Normalises the features of each head of k.
    pub k_norm: Option<RmsNorm>,
    /// Rotary encoding of q and k.
    pub rope: Option<RotaryEncoding>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    #[module(skip)]
    options: AttentionOptions,
}

impl DynamicMaskAttentionConfig {
    /// Features per head, given or derived.
    #[must_use]
    pub fn resolved_head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.d_model / self.n_heads.max(1))
    }

    /// Number of key/value heads, given or derived.
    #[must_use]
    pub fn resolved_kv_heads(&self) -> usize {
        self.n_kv_heads.unwrap_or(self.n_heads)
    }

    /// Makes the module on a device.
    ///
    /// # Panics
    ///
    /// If [`try_init`](Self::try_init) returns an error, with that error's text.
    #[must_use]
    pub fn init(&self, device: &Device) -> DynamicMaskAttention {
        expect(self.try_init(device))
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the heads, the head dimension, the window or the softcap are refused.
    pub fn try_init(&self, device: &Device) -> Result<DynamicMaskAttention, AttentionError> {
        let (head_dim, kv_heads) = (self.resolved_head_dim(), self.resolved_kv_heads());
        let options = AttentionOptions {
            keep_window: self.keep_window,
            causal: self.causal,
            softcap: self.softcap,
            ..AttentionOptions::default()
        };
        // The rules for one token are those for any sequence.
        let kv = [1, kv_heads, 1, head_dim];
        let q = [1, self.n_heads, 1, head_dim];
        Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::F32, &options)?;

        let linear = |from, to| {
            LinearConfig::new(from, to)
                .with_bias(false)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let (q_width, kv_width) = (self.n_heads * head_dim, kv_heads * head_dim);
        let norm = || {
            self.qk_norm
                .then(|| RmsNormConfig::new(head_dim).init(device))
        };
        let decay: Vec<f32> = (0..kv_heads)
            .map(|head| -((head + 1) as f32) / kv_heads as f32)
            .collect();
        Ok(DynamicMaskAttention {
            q_proj: linear(self.d_model, q_width),
            k_proj: linear(self.d_model, kv_width),
            v_proj: linear(self.d_model, kv_width),
            o_proj: linear(q_width, self.d_model),
            dt_proj: Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            }
            .init([kv_heads, kv_width], device),
            a: Param::from_tensor(Tensor::from_floats(decay.as_slice(), device)),
            q_norm: norm(),
            k_norm: norm(),
            rope: self.max_seq_len.map(|len| {
                RotaryEncodingConfig::new(len, head_dim)
                    .with_theta(self.rope_theta)
                    .init(device)
            }),
            n_heads: self.n_heads,
            n_kv_heads: kv_heads,
            head_dim,
            options,
        })
    }
}

impl DynamicMaskAttention {
    /// Attention over a sequence: `[batch, len, d_model]` to the same shape.
    ///
    /// # Panics
    ///
    /// If the last axis is not `d_model`, or the sequence is longer than the rotary encoding.
    #[must_use]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [q, k, v] = self.project(x);
        let (q, k) = (self.place(q), self.place(k));
        let out = flash_dma_attention(q, k, v, self.dt_proj.val(), self.a.val(), self.options);
        self.merge_heads(out)
    }

    /// q, k and v of `[batch, len, d_model]`, normalised: `[batch, heads, len, head_dim]`.
    pub(super) fn project(&self, x: Tensor<3>) -> [Tensor<4>; 3] {
        let [batch, len, _] = x.dims();
        let split = |tensor: Tensor<3>, heads: usize| -> Tensor<4> {
            tensor.reshape([batch, len, heads, self.head_dim])
        };
        let normal = |tensor: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(tensor),
            None => tensor,
        };
        let q = split(self.q_proj.forward(x.clone()), self.n_heads);
        let k = split(self.k_proj.forward(x.clone()), self.n_kv_heads);
        let v = split(self.v_proj.forward(x), self.n_kv_heads);
        let (q, k) = (normal(q, &self.q_norm), normal(k, &self.k_norm));
        [q, k, v].map(|tensor| tensor.swap_dims(1, 2))
    }

    /// `[batch, n_heads, len, head_dim]` to `[batch, len, d_model]`.
    pub(super) fn merge_heads(&self, out: Tensor<4>) -> Tensor<3> {
        let [batch, heads, len, dim] = out.dims();
        let out = out.swap_dims(1, 2).reshape([batch, len, heads * dim]);
        self.o_proj.forward(out)
    }

    /// The options of its attention.
    #[must_use]
    pub fn options(&self) -> AttentionOptions {
        self.options
    }

    /// Heads of k and v.
    pub(super) fn kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Features of a head.
    pub(super) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Rotated, from position 0 on.
    fn place(&self, tensor: Tensor<4>) -> Tensor<4> {
        match &self.rope {
            Some(rope) => {
                let ([_, _, len, _], [table, _, _]) = (tensor.dims(), rope.freq_complex.dims());
                assert!(
                    len <= table,
                    "{len} tokens are more than the {table} positions of the rotary encoding"
                );
                rotate(rope, tensor, 0)
            }
            None => tensor,
        }
    }
}

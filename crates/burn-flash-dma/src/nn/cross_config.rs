//! The configuration of cross-attention.

use super::cross::DynamicMaskCrossAttention;
use super::heads::{check_weights, norm_epsilon};
use super::scorer::{INITIAL, ScoreForm, Scorer};
use burn::config::Config;
use burn::module::Initializer;
use burn::nn::{LinearConfig, RmsNormConfig};
use burn::tensor::Device;
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem};

/// Configuration of [`DynamicMaskCrossAttention`].
///
/// ```
/// # use burn_flash_dma::nn::DynamicMaskCrossAttentionConfig;
/// let config = DynamicMaskCrossAttentionConfig::new(256, 8)
///     .with_d_context(Some(512))
///     .with_n_kv_heads(Some(2))
///     .with_keep_window(Some(128));
/// assert_eq!(config.resolved_head_dim(), 32);
/// ```
#[derive(Config, Debug)]
pub struct DynamicMaskCrossAttentionConfig {
    /// Features per token of the queries, and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Features per token of the context. Default: `d_model`.
    pub d_context: Option<usize>,
    /// Number of key/value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Features per head, a multiple of 8 up to 256. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// Number of tokens of the context that every query attends to, by head. Default: all, that is dense attention
    /// with a bias per key.
    pub keep_window: Option<usize>,
    /// The tokens ranked next after the window whose scores get a gradient in training, see
    /// [`Selector::runners_up`](crate::Selector::runners_up). Default: a quarter of the window with
    /// [`ScoreForm::Linear`], none with [`ScoreForm::Zoh`].
    pub runners_up: Option<usize>,
    /// RMS normalisation of each head of q and k. Default: true.
    #[config(default = true)]
    pub qk_norm: bool,
    /// What is added to the mean square in the normalisation of q and k. Default: 1e-5.
    pub norm_epsilon: Option<f64>,
    /// Whether the four projections have biases, and with [`ScoreForm::Zoh`] the projection of the scores. Default:
    /// false.
    #[config(default = false)]
    pub bias: bool,
    /// Factor on `q . k`. Default: `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// What the scores are made of; of either form they are added to the logits as well. Default: [`ScoreForm::Zoh`].
    #[config(default = "ScoreForm::Zoh")]
    pub score_form: ScoreForm,
    /// Initialiser of the four projections. Default: normal, mean 0, standard deviation 0.02.
    #[config(default = "Initializer::Normal{mean:0.0, std:0.02}")]
    pub initializer: Initializer,
    /// Initialiser of the projection that makes the scores. Default: normal, mean 0, standard deviation 0.02.
    pub score_initializer: Option<Initializer>,
}

impl DynamicMaskCrossAttentionConfig {
    /// Features per head, given or derived.
    #[must_use]
    pub fn resolved_head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.d_model / self.n_heads.max(1))
    }

    twin! {
        /// Makes the module on a device.
        pub fn init(&self, device: &Device) -> DynamicMaskCrossAttention = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the heads, the head dimension, the window, the scale, the softcap or the epsilon of the
    /// norms are refused.
    pub fn try_init(&self, device: &Device) -> Result<DynamicMaskCrossAttention, AttentionError> {
        let head_dim = self.resolved_head_dim();
        let kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        let d_context = self.d_context.unwrap_or(self.d_model);
        let options = AttentionOptions {
            keep_window: self.keep_window,
            causal: false,
            scale: self.scale,
            softcap: self.softcap,
            ..AttentionOptions::default()
        };
        // The rules for one token are those for any sequence.
        let [q, kv] = [self.n_heads, kv_heads].map(|heads| [1, heads, 1, head_dim]);
        Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::F32, &options)?;
        let widest = self.d_model.max(d_context).max(kv_heads);
        check_weights([widest, self.n_heads * head_dim])?;
        let epsilon = norm_epsilon(self.norm_epsilon)?;

        let linear = |from, to| {
            LinearConfig::new(from, to)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let (q_width, kv_width) = (self.n_heads * head_dim, kv_heads * head_dim);
        let norm = RmsNormConfig::new(head_dim).with_epsilon(epsilon);
        let norm = || self.qk_norm.then(|| norm.init(device));
        let initializer = self.score_initializer.as_ref().unwrap_or(&INITIAL);
        let widths = [d_context, kv_heads, head_dim];
        let scorer = Scorer::new(self.score_form, initializer, widths, device);
        Ok(DynamicMaskCrossAttention {
            q_proj: linear(self.d_model, q_width),
            k_proj: linear(d_context, kv_width),
            v_proj: linear(d_context, kv_width),
            o_proj: linear(q_width, self.d_model),
            scorer: match self.bias {
                true => scorer.with_bias(kv_heads, device),
                false => scorer,
            },
            q_norm: norm(),
            k_norm: norm(),
            d_model: self.d_model,
            d_context,
            n_heads: self.n_heads,
            n_kv_heads: kv_heads,
            runners_up: self.runners_up,
            options,
        })
    }
}

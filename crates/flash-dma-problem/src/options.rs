//! The caller's options.

use crate::{AlibiSlopes, Dropout, EngineChoice};

/// The options of dynamic-mask attention. The default is causal, keeps every key, scales by
/// `1/sqrt(head_dim)` and has neither softcap, ALiBi nor dropout.
///
/// ```
/// # use flash_dma_problem::AttentionOptions;
/// let options = AttentionOptions::new().with_keep_window(1024).with_softcap(30.0);
/// assert!(options.causal);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct AttentionOptions {
    /// How many keys each query keeps (the paper's `w`): the highest scored of the keys that it may see. `None` keeps
    /// all and is required without scores.
    pub keep_window: Option<usize>,
    /// Bottom-right aligned causal masking: query `i` sees the keys `j <= i + k_len - q_len`.
    pub causal: bool,
    /// Factor on `q . k`; `None` is `1/sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// `c` of `c * tanh(x / c)`, applied to the scaled product before the score is added.
    pub softcap: Option<f32>,
    /// ALiBi slopes, one per query head. `None` adds nothing; a cache refuses them.
    pub alibi: Option<AlibiSlopes>,
    /// Request bit-equal results over repeats. The portable and CPU engines always produce them.
    pub deterministic: bool,
    /// Dropout of the attention probabilities, for training. `None` drops nothing; a cache refuses it.
    pub dropout: Option<Dropout>,
    /// The engine of every pass; the fastest by default. Caches take no other.
    pub engine: EngineChoice,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self {
            keep_window: None,
            causal: true,
            scale: None,
            softcap: None,
            alibi: None,
            deterministic: false,
            dropout: None,
            engine: EngineChoice::Fastest,
        }
    }
}

impl AttentionOptions {
    /// The default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the `window` highest scored visible keys of each query.
    #[must_use]
    pub fn with_keep_window(mut self, window: usize) -> Self {
        self.keep_window = Some(window);
        self
    }

    /// Turns causal masking on or off.
    #[must_use]
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the factor on `q . k`.
    #[must_use]
    pub fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps the scaled product at `cap * tanh(x / cap)`.
    #[must_use]
    pub fn with_softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Adds ALiBi to the logits, or nothing with `None`. A number of slopes other than the number of query heads is an
    /// error, [`AttentionError::AlibiHeads`](crate::AttentionError::AlibiHeads).
    #[must_use]
    pub fn with_alibi(mut self, slopes: impl Into<Option<AlibiSlopes>>) -> Self {
        self.alibi = slopes.into();
        self
    }

    /// Requests bit-equal results over repeats.
    #[must_use]
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Drops out attention probabilities, or none with `None`.
    #[must_use]
    pub fn with_dropout(mut self, dropout: impl Into<Option<Dropout>>) -> Self {
        self.dropout = dropout.into();
        self
    }

    /// Forces an engine, or leaves the choice to the library. A forced engine that does not serve the call is an error,
    /// [`AttentionError::Engine`](crate::AttentionError::Engine).
    #[must_use]
    pub fn with_engine(mut self, engine: EngineChoice) -> Self {
        self.engine = engine;
        self
    }
}

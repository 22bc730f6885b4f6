//! What is printed of a configuration. `benches/generate_peer.py` prints the same keys, as far as PyTorch knows them.

use super::Options;
use super::timing::Times;
use crate::model::Origin;
use crate::shares::{self, Launched, Shares};
use serde::Serialize;

/// One configuration.
#[derive(Serialize)]
pub struct Row {
    /// Whose tokens they are.
    #[serde(flatten)]
    pub origin: Origin,
    /// The configuration.
    #[serde(flatten)]
    pub options: Options,
    /// Trained numbers.
    pub parameters: usize,
    /// Bytes of all caches.
    pub cache_bytes: usize,
    /// Reading the prompt, the first time, which compiles.
    pub first_prompt_ms: f64,
    /// The second time.
    pub prompt_ms: f64,
    /// Behind the prompt.
    #[serde(flatten)]
    pub times: Times,
}

/// The kernels of a token.
#[derive(Serialize)]
pub struct Profile {
    /// By kind and by kernel.
    #[serde(flatten)]
    pub all: shares::Profile,
    /// From the begin of the first kernel to the end of the last.
    pub span_ms: Option<f64>,
    /// The median of `queued` over the sum of the kernels' times.
    pub queued_over_kernels: f64,
}

/// What `--count-only` prints.
#[derive(Serialize)]
pub struct Counts {
    /// Launches before the token.
    pub before: usize,
    /// Launches of the token.
    pub token: usize,
}

impl Profile {
    /// The profile of a token's launches; `queued_ms` is the time of a token that was not watched.
    pub fn new(launched: &Launched, queued_ms: f64, kernels: usize) -> Self {
        let mut shares = Shares::default();
        for launch in &launched.timed {
            shares.add(launch);
        }
        Self {
            span_ms: launched.span_ms(),
            queued_over_kernels: queued_ms / shares.total.ms,
            all: shares.profile(std::slice::from_ref(launched), kernels),
        }
    }
}

//! The printed row of a configuration. `benches/generate_peer.py` prints the same keys, as far as PyTorch knows them.

use super::Options;
use super::timing::Times;
use crate::model::Origin;
use crate::shares::{self, Launched, Shares};
use serde::Serialize;

/// One configuration.
#[derive(Serialize)]
pub struct Row {
    /// Origin of the measurement.
    #[serde(flatten)]
    pub origin: Origin,
    /// The configuration.
    #[serde(flatten)]
    pub options: Options,
    /// Number of trained parameters.
    pub parameters: usize,
    /// Bytes of all caches.
    pub cache_bytes: usize,
    /// First reading of the prompt, which compiles.
    pub first_prompt_ms: f64,
    /// Second reading.
    pub prompt_ms: f64,
    /// Times after the prompt.
    #[serde(flatten)]
    pub times: Times,
}

/// The kernels of a token.
#[derive(Serialize)]
pub struct Profile {
    /// By kind and by kernel.
    #[serde(flatten)]
    pub all: shares::Profile,
    /// Time from the begin of the first kernel to the end of the last.
    pub span_ms: Option<f64>,
    /// Median of `queued` divided by the sum of the kernels' times.
    pub queued_over_kernels: f64,
}

/// Output of `--count-only`.
#[derive(Serialize)]
pub struct Counts {
    /// Launches before the token.
    pub before: usize,
    /// Launches of the token.
    pub token: usize,
}

impl Profile {
    /// Profile of a token's launches; `queued_ms` is the time of a token without profiling.
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

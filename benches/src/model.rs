//! The decoder and its options, shared by `bench step` and `bench generation`, and the origin of their rows.

use crate::Result;
use crate::options::Common;
use crate::place::Place;
use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, ScoreLearning, Scores, Selection};
use clap::{Args, ValueEnum};
use flash_dma_models::nn::{DecoderConfig, last_keys};
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// A model and the options of its measurement.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Model {
    /// Transformer blocks.
    #[arg(long, default_value_t = 8)]
    pub layers: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 1024)]
    pub d_model: usize,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    pub heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    pub kv_heads: usize,
    /// Keys that a query attends to [default: all].
    #[arg(long)]
    pub window: Option<usize>,
    /// Window of every other layer, which is local; 0 for no local layers.
    #[arg(long, default_value_t = 256)]
    pub local_window: usize,
    /// The layers' scores.
    #[arg(long, value_enum, default_value_t = ScoresName::Ranking)]
    pub scores: ScoresName,
    /// Keep the last keys of the window instead of the best ones: a sliding window.
    #[arg(long, requires = "window")]
    pub last: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub learning: Learning,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    #[command(flatten)]
    #[serde(flatten)]
    pub place: Place,
    /// Skip the time of each kernel.
    #[arg(long)]
    #[serde(skip)]
    pub no_profile: bool,
    /// Number of kernels to list, the slowest first.
    #[arg(long, default_value_t = 24)]
    #[serde(skip)]
    pub kernels: usize,
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
}

/// Parts of a layer's learning that are left out, to time them.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub struct Learning {
    /// No runners-up.
    #[arg(long)]
    pub without_runners_up: bool,
    /// Kept keys do not learn from their ranks.
    #[arg(long)]
    pub without_kept: bool,
    /// Rank gradients are not centred within a head.
    #[arg(long)]
    pub without_compete: bool,
}

impl Learning {
    /// The rest of the default learning of these scores.
    fn of(self, scores: Scores) -> ScoreLearning {
        let all = ScoreLearning::of(scores);
        ScoreLearning {
            runners_up: match self.without_runners_up {
                true => Some(0),
                false => all.runners_up,
            },
            kept: all.kept && !self.without_kept,
            compete: all.compete && !self.without_compete,
            ..all
        }
    }
}

/// Scores by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoresName {
    /// Scores that only rank.
    Ranking,
    /// DMA's own scores, which are added to the logits.
    Dma,
    /// Linear scores, which are added to the logits.
    Added,
}

impl ScoresName {
    fn of_layer(self) -> Scores {
        match self {
            Self::Ranking => Scores::Ranking,
            Self::Dma => Scores::Dma,
            Self::Added => Scores::Added,
        }
    }
}

impl Model {
    /// Configuration of its attention: the default layer, except for the options.
    pub fn attention(&self, positions: usize) -> DynamicMaskAttentionConfig {
        let scores = self.scores.of_layer();
        let layer = DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_scores(scores)
            .with_rope(Some(Rope::new(positions)));
        match self.window {
            Some(window) if !self.last => layer
                .with_selection(Selection::keep(window))
                .with_learning(Some(self.learning.of(scores))),
            window => last_keys(&layer, window),
        }
    }

    /// The decoder of that attention.
    pub fn decoder(&self, positions: usize) -> DecoderConfig {
        DecoderConfig::new(self.attention(positions), self.layers)
            .with_local_window((self.local_window > 0).then_some(self.local_window))
            .with_dtype(self.place.dtype.burn())
    }
}

/// Origin of a measurement.
#[derive(Clone, Serialize)]
pub struct Origin {
    /// `burn`; peers have other names.
    implementation: &'static str,
    /// Versions of Burn and CubeCL.
    versions: String,
    /// The chip if there are kernels, otherwise Burn's text for the device.
    gpu: String,
    /// Burn's backend.
    backend: String,
    /// True with Burn's fusion.
    fusion: bool,
    /// True with Burn's autotune.
    autotune: bool,
}

impl Origin {
    /// This program on a device.
    pub fn new(place: &Place, device: &Device) -> Self {
        let name = place.device.to_possible_value();
        let name = name.expect("no device is hidden");
        Self {
            implementation: "burn",
            versions: versions(),
            gpu: match crate::device::client(name.get_name()) {
                Some(client) => crate::device::name(&client),
                None => format!("{device:?}"),
            },
            backend: Dispatch::name(device.as_dispatch()),
            fusion: cfg!(feature = "fusion"),
            autotune: cfg!(feature = "autotune"),
        }
    }
}

/// Prints a row as one line of JSON, appends it to the named file, if any, and compares it with the baseline, if any.
pub fn append(row: &impl Serialize, common: &Common) -> Result {
    let line = serde_json::to_string(row)?;
    println!("{line}");
    if let Some(path) = &common.json {
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)?;
        writeln!(file, "{line}")?;
    }
    common.compare(std::slice::from_ref(row))
}

/// Time of a call in milliseconds, from idle device to idle device, and its result, which lives until then, as lazy
/// engines skip results that nobody holds.
pub fn clock<T>(device: &Device, call: impl FnOnce() -> T) -> Result<(f64, T)> {
    device.sync()?;
    let start = Instant::now();
    let returned = call();
    device.sync()?;
    Ok((start.elapsed().as_secs_f64() * 1e3, returned))
}

/// The manifest of the workspace, which pins Burn and CubeCL.
const MANIFEST: &str = include_str!("../../Cargo.toml");

/// `burn A, cubecl B`, as the workspace pins them.
fn versions() -> String {
    let named = |name| format!("{name} {}", pinned(name).expect("the workspace pins it"));
    ["burn", "cubecl"].map(named).join(", ")
}

/// Version after `name = { version = "=`.
fn pinned(name: &str) -> Option<&'static str> {
    let start = format!("{name} = {{ version = \"=");
    let line = MANIFEST.lines().find_map(|line| line.strip_prefix(&start));
    line?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_versions_are_found() {
        let versions = versions();
        let numbers = versions.split([' ', ',']).filter(|part| {
            let mut digits = part.split('.');
            digits.clone().count() == 3 && digits.all(|digit| digit.parse::<u32>().is_ok())
        });
        assert_eq!(numbers.count(), 2, "{versions}");
        assert_eq!(pinned("no-such-crate"), None);
    }
}

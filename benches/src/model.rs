//! What `bench step` and `bench generation` share: a decoder, its device, and whose rows they are.

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

/// A model, and what is told of it.
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
    /// Keys that a query attends to; all of them if left out.
    #[arg(long)]
    pub window: Option<usize>,
    /// Keys of a query in every other layer, which is local; 0 if none is.
    #[arg(long, default_value_t = 256)]
    pub local_window: usize,
    /// The layers' scores.
    #[arg(long, value_enum, default_value_t = ScoresName::Ranking)]
    pub scores: ScoresName,
    /// Keeps the last keys of the window in place of the best ones: a sliding window.
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
    /// Leaves out the time of each kernel.
    #[arg(long)]
    #[serde(skip)]
    pub no_profile: bool,
    /// Kernels to list, the slowest first.
    #[arg(long, default_value_t = 24)]
    #[serde(skip)]
    pub kernels: usize,
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
}

/// The parts of a layer's learning that are left out, to time them.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub struct Learning {
    /// Has no runners-up.
    #[arg(long)]
    pub without_runners_up: bool,
    /// Lets kept keys learn nothing by their ranks.
    #[arg(long)]
    pub without_kept: bool,
    /// Does not charge what scores of a head gain to all of them.
    #[arg(long)]
    pub without_compete: bool,
}

impl Learning {
    /// The rest of what these scores learn by default.
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
    /// They only rank.
    Ranking,
    /// DMA's own, which are added to the logits.
    Dma,
    /// Linear ones, which are added to the logits.
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
    /// Its attention: the layer as it is by default, but for what the options say.
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

/// What was measured.
#[derive(Serialize)]
pub struct Origin {
    /// `burn`; a peer's is another.
    implementation: &'static str,
    /// Of Burn and CubeCL.
    versions: String,
    /// The chip if there are kernels, else the device as Burn prints it.
    gpu: String,
    /// Burn's backend.
    backend: String,
    /// Burn's fusion.
    fusion: bool,
    /// Burn's autotune.
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

/// Prints a row as one line of JSON, and appends it to the file if one is named.
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
    Ok(())
}

/// The milliseconds of a call, from an idle device until it is idle again, and what it returned: that lives until the
/// device is idle, as lazy engines leave out what nobody holds.
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

/// The version behind `name = { version = "=`.
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

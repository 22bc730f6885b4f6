//! What `bench step` and `bench generation` share: a decoder, its device, and whose rows they are.

use crate::Result;
use crate::options::Common;
use crate::place::Place;
use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Scores, Selection};
use clap::{Args, ValueEnum};
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
    /// The layers' scores.
    #[arg(long, value_enum, default_value_t = ScoresName::Ranking)]
    pub scores: ScoresName,
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
    pub fn attention(&self, window: usize, positions: usize) -> DynamicMaskAttentionConfig {
        DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_scores(self.scores.of_layer())
            .with_selection(Selection::keep(window))
            .with_rope(Some(Rope::new(positions)))
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

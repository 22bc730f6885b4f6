//! What `bench step` and `bench generation` share: a decoder, its device, and whose rows they are.

use crate::Result;
use crate::options::Common;
use crate::place::{DeviceName, DtypeName};
use crate::versions::versions;
use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreForm};
use clap::Args;
use serde::Serialize;
use std::error::Error;
use std::io::Write;
use std::time::Instant;

/// Where Burn computes, and in which type.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Place {
    /// Device.
    #[arg(long, value_enum, default_value = "cuda")]
    pub device: DeviceName,
    /// Element type of the activations, and of the caches.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DtypeName,
}

impl Place {
    /// The device, which draws the same random numbers in every process.
    pub fn open(&self) -> Result<Device> {
        let device = self.device.open(self.dtype)?;
        device.seed(0);
        Ok(device)
    }
}

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

impl Model {
    /// Its attention, with DMA's own scores: said here, so that the rows stay those of one layer whatever the defaults become.
    pub fn attention(&self, positions: usize) -> DynamicMaskAttentionConfig {
        DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_score_form(ScoreForm::Zoh)
            .with_score_role(Some(ScoreRole::RankAndBias))
            .with_keep_window(self.window)
            .with_max_seq_len(Some(positions))
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
        Self {
            implementation: "burn",
            versions: versions(),
            gpu: match crate::device::client(place.device.name()) {
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
pub fn clock<T, E: Into<Box<dyn Error>>>(
    device: &Device,
    call: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<(f64, T)> {
    device.sync()?;
    let start = Instant::now();
    let returned = call().map_err(Into::into)?;
    device.sync()?;
    Ok((start.elapsed().as_secs_f64() * 1e3, returned))
}

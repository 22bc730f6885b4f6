//! Runs attention cases from safetensors files through the library's Burn functions.
//!
//! A case file holds `q [B, Hq, Nq, D]`, `k`, `v [B, Hkv, Nk, D]`, and optionally `scores
//! [B, Hkv, Nk]`, `documents [B, Nk]` (ids, I32 or I64), `dout [B, Hq, Nq, D]`, `dlse [B, Hq, Nq]`.
//! In the place of scores it may hold `mask` (bool) and `bias`, each `[B | 1, Hq | Hkv | 1, Nq | 1,
//! Nk | 1]`. Its metadata holds under `options` a JSON object with any of `window`, `causal` (true),
//! `scale`, `softcap`, `mask_hides` (false: `true` in the mask shows), `dtype` ("f32"). The result, a
//! file of the same name under `--out`, holds `out`, `lse`, `dq`, `dk`, `dv`, `dscores` or `dbias` in
//! f32 and `intervals` in i32. `torch_cases.py` makes cases and compares results with PyTorch.

mod case;
mod error;
mod result;
mod run;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::prelude::*;
use burn::tensor::FloatDType;
use clap::{Parser, ValueEnum};

use case::Case;
use error::Error;

/// Runs attention cases from safetensors files and writes the results to others.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Case files.
    #[arg(required = true, value_name = "CASE")]
    cases: Vec<PathBuf>,
    /// Device to run on.
    #[arg(long, value_enum, default_value = "flex")]
    device: DeviceName,
    /// Element type the inputs are cast to: f32, f16 or bf16 [default: the case's].
    #[arg(long)]
    dtype: Option<String>,
    /// Directory of the results.
    #[arg(long, value_name = "DIR", default_value = "runs/interop")]
    out: PathBuf,
    /// Timed runs after the first one.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DeviceName {
    Flex,
    Cuda,
    Cpu,
    Wgpu,
}

impl DeviceName {
    fn open(self) -> Result<Device, String> {
        let missing = match self {
            #[cfg(feature = "flex")]
            Self::Flex => return Ok(Device::flex()),
            #[cfg(feature = "cuda")]
            Self::Cuda => return Ok(Device::cuda(0)),
            #[cfg(feature = "cpu")]
            Self::Cpu => return Ok(Device::cpu()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => return Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(not(feature = "flex"))]
            Self::Flex => "flex",
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => "cuda",
            #[cfg(not(feature = "cpu"))]
            Self::Cpu => "cpu",
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => "wgpu",
        };
        #[allow(unreachable_code, reason = "with all features no device is missing")]
        Err(format!(
            "--device {missing} is not compiled in: build with --features {missing}"
        ))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let device = match cli.device.open() {
        Ok(device) => device,
        Err(message) => {
            eprintln!("interop: {message}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = fs::create_dir_all(&cli.out) {
        eprintln!("interop: {}: {error}", cli.out.display());
        return ExitCode::from(2);
    }
    println!(
        "{:<32} {:>5} {:>22} {:>22}",
        "case", "dtype", "cold fwd + bwd, ms", "warm fwd + bwd, ms"
    );
    let mut failed = 0;
    for path in &cli.cases {
        if let Err(error) = run_file(path, &device, &cli) {
            eprintln!("{}: {error}", path.display());
            failed += 1;
        }
    }
    if failed == 0 {
        return ExitCode::SUCCESS;
    }
    eprintln!("interop: {failed} of {} cases failed", cli.cases.len());
    ExitCode::FAILURE
}

fn run_file(path: &Path, device: &Device, cli: &Cli) -> Result<(), Error> {
    let case = Case::read(path)?;
    let name = cli
        .dtype
        .as_ref()
        .or(case.options.dtype.as_ref())
        .map_or("f32", String::as_str);
    let outcome = run::run(&case, device, dtype(name)?, cli.repeats)?;
    let file = path
        .file_name()
        .ok_or_else(|| Error::Io("no file name".into()))?;
    result::write(&cli.out.join(file), &outcome, name)?;
    let times = |times: run::Times| {
        let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        format!(
            "{:.3} + {:.3}",
            milliseconds(times.forward),
            milliseconds(times.backward)
        )
    };
    let stem = path.file_stem().unwrap_or(file).to_string_lossy();
    println!(
        "{stem:<32} {name:>5} {:>22} {:>22}",
        times(outcome.cold),
        times(outcome.warm)
    );
    Ok(())
}

fn dtype(name: &str) -> Result<FloatDType, Error> {
    match name {
        "f32" => Ok(FloatDType::F32),
        "f16" => Ok(FloatDType::F16),
        "bf16" => Ok(FloatDType::BF16),
        other => Err(Error::UnknownDtype(other.to_string())),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;

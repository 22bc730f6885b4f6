//! Runs attention cases from safetensors files through the library's Burn functions.
//!
//! A case file holds `q [B, Hq, Nq, D]`, `k`, `v [B, Hkv, Nk, D]`, and optionally `scores
//! [B, Hkv, Nk]`, `documents [B, Nk]` (ids, I32 or I64), `dout [B, Hq, Nq, D]`, `dlse [B, Hq, Nq]`.
//! Instead of scores it may hold `mask` (bool) and `bias`, each `[B | 1, Hq | Hkv | 1, Nq | 1, Nk | 1]`. Its metadata
//! holds under `options` a JSON object with any of `window`, `causal` (true), `scale`, `softcap`, `mask_hides`
//! (false: `true` in the mask shows), `dtype` ("f32"). The result, a file of the same name under `--out`, holds
//! `out`, `lse`, `dq`, `dk`, `dv`, `dscores` or `dbias` in f32 and `intervals` in i32. `torch_cases.py` makes cases
//! and compares results with PyTorch.

mod case;
mod run;

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::prelude::*;
use burn::tensor::{DType, FloatDType};
use clap::Parser;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use case::Case;

/// Runs attention cases from safetensors files and writes the results to others.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Case files.
    #[arg(required = true, value_name = "CASE")]
    cases: Vec<PathBuf>,
    /// Device: flex, cuda, cpu or wgpu, each a feature of its name.
    #[arg(long, default_value = "flex")]
    device: String,
    /// Element type the inputs are cast to: f32, f16 or bf16 [default: the case's].
    #[arg(long)]
    dtype: Option<String>,
    /// Directory of the results.
    #[arg(long, value_name = "DIR", default_value = "runs/interop")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ready = fs::create_dir_all(&cli.out).map_err(|e| format!("{}: {e}", cli.out.display()));
    let device = match ready.and_then(|()| open(&cli.device)) {
        Ok(device) => device,
        Err(message) => {
            eprintln!("interop: {message}");
            return ExitCode::from(2);
        }
    };
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

fn open(name: &str) -> Result<Device, String> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        "cuda" => Ok(Device::cuda(0)),
        #[cfg(feature = "cpu")]
        "cpu" => Ok(Device::cpu()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        other => Err(format!(
            "--device {other} is not compiled in: flex, cuda, cpu and wgpu are features"
        )),
    }
}

fn run_file(path: &Path, device: &Device, cli: &Cli) -> Result<(), Box<dyn Error>> {
    let case = Case::read(path)?;
    let name = cli.dtype.as_ref().or(case.options.dtype.as_ref());
    let name = name.map_or("f32", String::as_str);
    let dtype = match name {
        "f32" => FloatDType::F32,
        "f16" => FloatDType::F16,
        "bf16" => FloatDType::BF16,
        other => return Err(format!("unknown dtype {other}: f32, f16 or bf16").into()),
    };
    let results = run::run(&case, device, dtype)?;
    let file = cli.out.join(path.file_name().ok_or("no file name")?);
    write(&file, &results, name)?;
    println!("{name:>4}  {}", file.display());
    Ok(())
}

/// Writes the results of a case, with the element type that computed them in the metadata.
fn write(path: &Path, results: &run::Results, dtype: &str) -> Result<(), Box<dyn Error>> {
    let mut views = Vec::with_capacity(results.len());
    for (name, data) in results {
        let dtype = match data.dtype() {
            DType::I32 => Dtype::I32,
            _ => Dtype::F32,
        };
        // The format is little-endian, and so is every device Burn runs on.
        let view = TensorView::new(dtype, data.shape().to_vec(), data.as_bytes())?;
        views.push((*name, view));
    }
    let metadata = HashMap::from([("dtype".to_string(), dtype.to_string())]);
    Ok(safetensors::serialize_to_file(views, Some(metadata), path)?)
}

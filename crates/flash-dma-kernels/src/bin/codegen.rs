//! `codegen OUT_DIR [PREFIX...]`: writes the CUDA variants named with a prefix, or all, as CUDA C++, without a GPU.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(out) = args.next().map(PathBuf::from) else {
        eprintln!("usage: codegen OUT_DIR [PREFIX...]");
        return ExitCode::from(2);
    };
    let written = std::fs::create_dir_all(&out)
        .map_err(|e| format!("cannot create {}: {e}", out.display()))
        .and_then(|()| flash_dma_kernels::codegen::write(&out, &args.collect::<Vec<_>>()));
    match written {
        Ok(variants) => {
            println!("codegen: {variants} variants in {}", out.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("codegen: {e}");
            ExitCode::FAILURE
        }
    }
}

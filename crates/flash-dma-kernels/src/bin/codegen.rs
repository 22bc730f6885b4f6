//! `codegen OUT_DIR`: writes every CUDA variant of the kernels as CUDA C++, without a GPU.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(out) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: codegen OUT_DIR");
        return ExitCode::from(2);
    };
    let written = std::fs::create_dir_all(&out)
        .map_err(|e| format!("cannot create {}: {e}", out.display()))
        .and_then(|()| flash_dma_kernels::codegen::write(&out));
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

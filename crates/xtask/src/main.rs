//! The project's commands: `cargo xtask help` lists them.
//!
//! The crate depends on the standard library alone, so that a fresh checkout runs it within seconds.

mod bench;
mod book;
mod codegen;
mod demo;
mod fuzz;
mod gpu_pack;
mod new_crate;
mod process;
mod release;
mod setup;
mod test;
mod tidy;
mod tools;
mod vulkan;

use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask <command>

  demo             A model learns which keys to keep: pictures before and after, and a table. On the CPU
                   (Burn's Flex backend); needs Rust and a C compiler, nothing else.
  new DIR          An empty crate that depends on this checkout, with the README's example as its
                   program, and run it.
  test [--full]    What every change passes: setup, format, house rules, spelling, reports, lints, tests, generated
                   CUDA code that changed. --full: what this leaves out, which CI runs behind it: licences and
                   sources of the dependencies, documentation, the tests of tests/long.txt, the book, a dry run
                   of the release, the program of a new crate, the workspace `lab`.
  test-vulkan [--spirv]
                   The kernels' tests on Vulkan, through wgpu and WGSL: on Mesa's driver for CPUs, which
                   is installed if there is no driver. --spirv compiles them as the feature `vulkan`
                   does, for a driver that takes it.
  setup            Provide LLVM's libraries for CubeCL, a C++ compiler and Python. `test`, `codegen`
                   and `gpu-pack` do this first.
  codegen [--bless | --full | --sources] [PREFIX..]
                   Generate every CUDA kernel variant, compile it with NVRTC and ptxas (no GPU needed)
                   and compare registers, spills, shared memory and tensor-core instructions with
                   docs/codegen.tsv and docs/codegen-spills.tsv. --bless rewrites the former. What it
                   knows of the same source is not compiled again; --full compiles all.
                   --sources compiles nothing and prints a hash of each variant's source. With prefixes,
                   only variants whose names begin so.
  fuzz --engine NAME [--minutes M] [--problems N] [--seed S] [..]
                   Random problems on one engine (cpu, kernels-cpu, burn-flex, cuda, cuda-mma, cuda-wgmma,
                   cuda-portable, burn-cuda, wgpu, vulkan), every output compared with the oracle; one that fails
                   is shrunk. --help lists all options.
  bench COMMAND [--runtime NAME] [--json FILE] [--baseline FILE] [..]
                   Time a part of the library: attention, masks, decode, products, selections, step, generation or
                   cpu. --baseline: fails if a time has grown by more than 5 %, and by more than the spread, since
                   the rows of FILE, made by --json on the same kind of device. COMMAND --help lists all options.
  gpu-pack [--only NAME,..] [--tuned] [..]
                   Build tests, models, bench and the examples, or only those named,
                   for CUDA into gpu-pack/flash-dma-gpu.tar.xz, for a machine with a GPU and without Rust. --tuned
                   builds with autotune, as Burn's users do. Other options go to cargo's build.
  tidy             The house rules: links, included code, lints, tests that run, short loops of kernels.
  book [--open]    Build the book with mdBook, which is built first where it is missing.
  help             This text.
";

fn main() -> ExitCode {
    if let Some(result) = test::rustdoc(std::env::args_os().skip(1)) {
        return ended(result);
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (command, options) = match args.split_first() {
        Some((command, options)) => (command.as_str(), options),
        None => ("help", &[][..]),
    };
    ended(match command {
        "setup" => process::no_options(options).and_then(|()| setup::all()),
        "demo" => demo::run(options),
        "new" => new_crate::run(options),
        "test" => test::run(options),
        "test-vulkan" => vulkan::run(options),
        "codegen" => codegen::run(options),
        "fuzz" => fuzz::run(options),
        "bench" => bench::run(options),
        "gpu-pack" => gpu_pack::run(options),
        "tidy" => process::no_options(options).and_then(|()| tidy::run()),
        "book" => book::run(options),
        "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown command `{other}`\n\n{HELP}")),
    })
}

fn ended(result: process::Result) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
